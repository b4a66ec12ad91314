"""Definitions that move before the merge (the knots of the import graph)."""
import ast
import re
from pathlib import Path


def flat(n):
    out=[]
    for t in (n.targets if isinstance(n,ast.Assign) else [n.target] if isinstance(n,ast.AnnAssign) else []):
        out+= [x for x in (t.elts if isinstance(t,ast.Tuple) else [t]) if isinstance(x,ast.Name)]
    return out
def split(path, names, new, typed=False):
    p=Path(path); text=p.read_text(); lines=text.splitlines(keepends=True); tree=ast.parse(text)
    took=[]; cuts=[]
    for n in tree.body:
        own=[n.name] if isinstance(n,(ast.FunctionDef,ast.ClassDef)) else [t.id for t in flat(n)]
        if any(o in names for o in own):
            a=min([n.lineno,*[d.lineno for d in getattr(n,'decorator_list',[])]])-1
            while a and lines[a-1].startswith('#'): a-=1
            took.append(''.join(lines[a:n.end_lineno])); cuts.append((a,n.end_lineno))
    assert took,(path,names)
    heads=[ast.get_source_segment(text,n) for n in tree.body if isinstance(n,(ast.Import,ast.ImportFrom)) or (isinstance(n,ast.If) and 'TYPE_CHECKING' in ast.unparse(n.test))]
    module=path[:-3].replace('/','.')
    body='\n\n\n'.join(t.strip('\n') for t in took)
    used={x.id for x in ast.walk(ast.parse(body)) if isinstance(x,ast.Name)}
    defined={n.name for n in tree.body if isinstance(n,(ast.FunctionDef,ast.ClassDef))}|{t.id for n in tree.body if isinstance(n,(ast.Assign,ast.AnnAssign)) for t in flat(n)}
    back=sorted((used&defined)-set(names))
    doc=''
    out='from __future__ import annotations\n'+'\n'.join(h for h in heads if '__future__' not in h)+'\n'+(f'from {module} import {", ".join(back)}\n' if back else '')+'\n\n'+body+'\n'
    Path(new).write_text(out)
    for a,b in reversed(cuts): del lines[a:b]
    rest=''.join(lines); t2=ast.parse(rest)
    at=max([0,*[n.end_lineno for n in t2.body if isinstance(n,(ast.Import,ast.ImportFrom))]])
    L=rest.splitlines(keepends=True)
    nm=new[:-3].replace('/','.')
    keep=names
    line=f'from {nm} import {", ".join(keep)}\n'
    if at==0:
        at=t2.body[0].end_lineno
        line='\n'+line
    L.insert(at,line); p.write_text(''.join(L))
split('kvexp/core/second_pass.py',['SecondPass'],'kvexp/core/method.py')
split('kvexp/core/sequence.py',['obstacle'],'kvexp/core/config.py')
split('kvexp/core/sequence.py',['spare'],'kvexp/core/ranking.py')
split('kvexp/core/triton_ops.py',['available','check_installed'],'kvexp/core/config.py')
split('kvexp/hf/load.py',['SHOWN'],'kvexp/util.py')
split('kvexp/run/plan.py',['TABLES_BYTES'],'kvexp/run/speed.py')
split('kvexp/run/answers.py',['ItemPrompt','bench_of','item_prompt','_generation_prompt','_bases'],'kvexp/run/prompts.py')
split('kvexp/diagnose/case.py',['settings_at','examples_of','with_limit_of'],'kvexp/run/batches.py')
split('kvexp/run/answers.py',['tokens_to_come'],'kvexp/run/prompts.py')
split('kvexp/diagnose/case.py',['Row'],'kvexp/run/batches.py')
split('experiments/studies/causal.py',['TOKEN','SPAN','LAYER','HEAD'],'kvexp/diagnose/replay.py')
for f in ['kvexp/results/wandb_log.py','kvexp/results/wandb_log.py']:
    p=Path(f); s=p.read_text()
    pkg='log' if 'log/' in f else 'dashboards'
    doc=ast.get_docstring(ast.parse(Path(f'kvexp/{pkg}/__init__.py').read_text()))
    s=s.replace(f'import kvexp.{pkg}\n','').replace(f'description=kvexp.{pkg}.__doc__','description=DESCRIPTION')
    t=ast.parse(s); at=max(n.end_lineno for n in t.body if isinstance(n,(ast.Import,ast.ImportFrom)))
    L=s.splitlines(keepends=True); L.insert(at,'\nDESCRIPTION = """'+doc+'"""\n'); p.write_text(''.join(L))

p=Path('kvexp/generate/loglikelihood.py'); s=p.read_text(); s=s.replace('    "forward_last",\n',''); p.write_text(s)
p=Path('tests/reference_check.py'); s=p.read_text()
a=s.index('    for field, values in ((name'); b=s.find('\n\n\n',a)
s=s[:a]+re.sub(r'\bfield\b','part',s[a:b])+s[b:]; p.write_text(s)
p=Path('kvexp/results/views.py'); s=p.read_text()
s=s.replace('from kvexp.tasks.articles import assistants, assistants_digest\n','')
a=s.index('    if assistants_digest() not in')
s=s[:a]+'    from kvexp.tasks.articles import assistants, assistants_digest  # late: other tables wait for no task\n\n'+s[a:]
p.write_text(s)
