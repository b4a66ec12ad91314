"""Wrap comment and docstring lines that became too long."""
import ast
import json
import re
import subprocess
from pathlib import Path

out=subprocess.run(['.venv/bin/ruff','check','--select','E501','--output-format','json','.'],capture_output=True,text=True).stdout
by={}
for d in json.loads(out): by.setdefault(d['filename'],[]).append(d['location']['row'])
left=[]
for f,rows in by.items():
    p=Path(f); s=p.read_text(); L=s.split('\n'); t=ast.parse(s)
    doc=set()
    for n in ast.walk(t):
        if isinstance(n,ast.Constant) and isinstance(n.value,str) and L[n.lineno-1][n.col_offset:].startswith(('"""','r"""')):
            doc|=set(range(n.lineno,n.end_lineno+1))
    for r in sorted(rows,reverse=True):
        line=L[r-1]; ind=re.match(r'\s*(# )?',line).group(0)
        if line.lstrip().startswith('#') or (r in doc and not line.rstrip().endswith('\\')):
            cut=line.rfind(' ',0,119)
            if cut>len(ind)+20:
                rest=line[cut+1:]
                single = line.lstrip().startswith(('"""','r"""')) and line.rstrip().endswith('"""')
                if single:  # a one-line docstring: closing quotes go on their own
                    body=rest.rstrip()[:-3]
                    L[r-1]=line[:cut]; L.insert(r,ind+body); L.insert(r+1,ind+'"""'); continue
                L[r-1]=line[:cut]
                nxt=L[r] if r<len(L) else ''
                nind=re.match(r'\s*(# )?',nxt).group(0)
                if nind==ind and nxt.strip() not in('','#','"""') and not nxt[len(ind):].startswith((' ','-','"""','*')) and len(nxt)+len(rest)+1<=120 and not nxt.strip().endswith('"""'):
                    L[r]=ind+rest+' '+nxt[len(ind):]
                else: L.insert(r,ind+rest)
                continue
        left.append((f,r,line.strip()[:150]))
    p.write_text('\n'.join(L))
for x in left: print(*x)
