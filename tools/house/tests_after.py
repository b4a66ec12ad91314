import re
from pathlib import Path

for p in Path('tests').glob('*/test_*.py'):
    if p.parts[1] in('faults','peers','golden','frozen','fixtures'): continue
    s=p.read_text()
    def f(m): return m.group(0)
    s=re.sub(r'(__file__\)(?:\.resolve\(\))?\.parents\[)(\d)\]',lambda m:m.group(1)+str(int(m.group(2))+1)+']',s)
    s=re.sub(r'(__file__\)(?:\.resolve\(\))?)\.parent(?!s)',r'\1.parents[1]',s)
    p.write_text(s)
t=Path('pyproject.toml'); s=t.read_text()
folders=sorted({p.parent.as_posix() for p in Path('tests').glob('*/test_*.py')}-{'tests/faults','tests/peers','tests/golden','tests/frozen'})
s=s.replace('pythonpath = [".", "tests"]','pythonpath = [".", "tests", '+', '.join(f'"{f}"' for f in folders)+']')
t.write_text(s)
import json
import subprocess

M={m:t for t,ms in json.load(open('build/house/tests_map.json'))['targets'].items() for m in ms}
for f in subprocess.run(['git','ls-files','-co','--exclude-standard'],capture_output=True,text=True).stdout.split('\n'):
    p=Path(f)
    if not f or not p.is_file() or p.is_symlink() or f.startswith(('CHANGELOG','tests/frozen')) or p.suffix not in('.md','.py','.toml','','.yaml','.yml'): continue
    try: s=p.read_text()
    except UnicodeDecodeError: continue
    n=re.sub(r'tests/test_\w+\.py',lambda m:M.get(m.group(0),m.group(0)),s)
    if n!=s: p.write_text(n)
