"""After the merge: data files move, dotted names and commands in every text follow."""
import json
import re
import subprocess
from pathlib import Path

plan=json.load(open('build/house/map.json')); renamed=json.load(open('build/house/renamed.json'))
def module_of(p):
    n=p[:-3].replace('/','.')
    if n.startswith('tests.'): n=n[6:]
    return n[:-9] if n.endswith('.__init__') else n
M={}
for t,ms in plan['targets'].items():
    for m in ms: M[module_of(m)]=module_of(t)
for n in list(M):
    if n.endswith('.__main__'): M.setdefault(n[:-9],M[n])
SAME={'kvexp','kvexp.run','kvexp.results','kvexp.diagnose','kvexp.lm_eval','kvexp.tasks','kvexp.core','kvexp.methods','kvexp.retrieval','kvexp.generate','kvexp.tasks.lm_eval','kvexp.tasks.testbed','kvexp.cli'}
# packages whose name is no module of the new house and that a text may name as such
PACK={'kvexp.hf':'kvexp.hf','kvexp.run.batches':'kvexp.run.batches','kvexp.run.settings':'kvexp.run.settings','kvexp.run':'kvexp.run','kvexp.run.store':'kvexp.run.store','kvexp.results.plots':'kvexp.results.plots','kvexp.results.report':'kvexp.results.report','kvexp.results.wandb_log':'kvexp.results.wandb_log','kvexp.results.wandb_log':'kvexp.results.wandb_log','kvexp.run.evictions':'kvexp.run.evictions','kvexp.run.user_methods':'kvexp.run.user_methods','kvexp.core.observe':'kvexp.core.observe','kvexp.core.decode':'kvexp.core.decode','kvexp.run.plan':'kvexp.run.plan','kvexp.run.calibrate':'kvexp.run.calibrate','kvexp.run.batches':'kvexp.run.batches','kvexp.engines.trace':'kvexp.engines.trace','kvexp.engines.custom_generate':'kvexp.engines.custom_generate','experiments.studies.league':'experiments.studies.league','experiments.studies.yardstick':'experiments.studies.yardstick','experiments.studies.testbed':'experiments.studies.testbed','kvexp.tasks.testbed':'kvexp.tasks.testbed','kvexp.tasks.articles':'kvexp.tasks.articles','tests/reference_check.py':'tests/reference_check.py','experiments.studies.causal':'experiments.studies.causal'}
M.update({k:v for k,v in PACK.items()})
CMD=[(r'python -m kvexp\.figures\.quality|kvexp plot quality','kvexp plot quality'),(r'python -m kvexp\.figures\.heatmap|kvexp plot heatmap','kvexp plot heatmap'),(r'python -m kvexp\.figures\.divergence_curves','kvexp plot divergence'),(r'python -m kvexp\.figures\.life_curves','kvexp plot life'),(r'python -m kvexp\.figures\.bytes_frontier','kvexp plot bytes'),
(r'python -m kvexp\.results\.longbench_table','kvexp longbench'),(r'python -m kvexp\.hf\.fetch','kvexp fetch'),(r'python -m kvexp\.tasks\.testbed|python -m experiments.studies.testbed export','python -m experiments.studies.testbed export'),
(r'python -m kvexp\.training kvzap','kvexp calibrate kvzap'),(r'python -m kvexp\.training|python -m experiments.studies.testbed train','python -m experiments.studies.testbed train'),
(r'python -m kvexp\.divergence\.scale','python -m experiments.studies.kl_scale scale'),(r'python -m kvexp\.divergence\.agreement','python -m experiments.studies.kl_scale agreement'),
(r'python -m kvexp\.trace\.trace_check','python kvexp/engines/trace_check.py'),(r'python -m kvexp\.lm_eval','kvexp lm-eval'),(r'python -m kvexp\.reference_check|python tests/reference_check.py','python tests/reference_check.py'),
(r'python -m kvexp\.league\.submit|python -m experiments.studies.league submit(?![-\w])','python -m experiments.studies.league submit'),(r'python -m kvexp\.league|python -m experiments.studies.league','python -m experiments.studies.league'),(r'python -m kvexp\.yardstick|python -m experiments.studies.yardstick','python -m experiments.studies.yardstick'),(r'python -m experiments.studies.causal','python -m experiments.studies.causal'),
(r'python -m kvexp\.(results|report|diagnose|divergence|log|dashboards|calibrate|trace)(?![\w.])',r'kvexp \1')]
def texts(s,path):
    make=path.endswith(('Makefile','.ci/run'))
    for a,b in CMD: s=re.sub(a,b,s)
    if make: s=re.sub(r'(\$\(BIN\)|\.venv/bin)/kvexp python -m',r'\1/python -m',re.sub(r'(\$\(BIN\)|\.venv/bin)/python -m experiments','\\1/python -m experiments',s))
    def dotted(m):
        w=m.group(0).split('.')
        for cut in range(len(w),1,-1):
            old='.'.join(w[:cut])
            if old in SAME: return m.group(0)
            if old in M:
                rest=w[cut:]
                if rest and f'{old}:{rest[0]}' in renamed: rest[0]=renamed[f'{old}:{rest[0]}']
                new='.'.join([M[old],*rest])
                return new
        return m.group(0)
    s=re.sub(r'(?:(?<=\\n)|\b)kvexp(?:\.[A-Za-z_]\w*)+',dotted,s)
    s=s.replace('kvexp\\.models\\.','kvexp\\.hf\\.')
    if path.endswith('.md'): s=s.replace('from kvexp.results import table','from kvexp.results.table import table')
    s=s.replace('"kvexp" / "tasks" / "testbed_models"','"kvexp" / "tasks" / "testbed_models"').replace('"kvexp" / "engines"','"kvexp" / "engines"').replace('Path(kvexp.tasks.testbed.__file__).parent / "testbed_models"','Path(kvexp.tasks.testbed.__file__).parent / "testbed_models"').replace('files("kvexp.tasks").joinpath("articles_data")','files("kvexp.tasks").joinpath("articles_data")')
    if 'device_' in path and path.startswith('tests/'):
        for t,ms in plan['targets'].items():
            for m in ms:
                if m.count('/')>=2: s=s.replace('"'+m[6:]+':','"'+t[6:]+':')
    def slashed(m):
        p=m.group(0)
        mod=module_of(p) if p.endswith('.py') else None
        if mod in M and mod not in ('kvexp',):
            t=next(t for t,ms in plan['targets'].items() if p in ms) if any(p in ms for ms in plan['targets'].values()) else None
            return t or p
        return p
    s=re.sub(r'kvexp(?:/\w+)+\.py',slashed,s)
    for a,b in [('kvexp/tasks/testbed_models','kvexp/tasks/testbed_models'),('kvexp/tasks/articles_data','kvexp/tasks/articles_data'),('kvexp/results/assets','kvexp/results/assets'),('kvexp/engines/kit','kvexp/engines/kit'),('experiments/studies','experiments/studies'),('kvexp/hf/','kvexp/hf/'),('kvexp/diagnose','kvexp/diagnose')]: s=s.replace(a,b)
    return s
FIX=[('<title>kvexp league</title>','<title>kvexp league</title>'),('can be measured again: "
        "python -m experiments.studies.league check."','can be measured again: "\n        "python -m experiments.studies.league check."')]
def mv(a,b): Path(b).parent.mkdir(parents=True,exist_ok=True); Path(a).rename(b)
if Path('kvexp/tasks/testbed_models').exists():
    mv('kvexp/tasks/testbed_models','kvexp/tasks/testbed_models'); mv('kvexp/tasks/articles_data','kvexp/tasks/articles_data')
    mv('kvexp/results/assets','kvexp/results/assets'); mv('kvexp/engines/kit','kvexp/engines/kit'); mv('experiments/studies/published.yaml','experiments/studies/published.yaml')
files=subprocess.run(['git','ls-files','-co','--exclude-standard'],capture_output=True,text=True).stdout.split('\n')
for f in files:
    p=Path(f)
    if not f or not p.is_file() or p.is_symlink() or f.startswith(('tests/frozen','CHANGELOG','experiments/measured','tests/golden/releases')) or p.suffix in('.npz','.safetensors','.png','.svg','.json','.jsonl','.parquet','.csv'): continue
    try: s=p.read_text()
    except UnicodeDecodeError: continue
    n=texts(s,f)
    for a,b in FIX: n=n.replace(a,b)
    if n!=s: p.write_text(n)
