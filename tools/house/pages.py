from pathlib import Path

p=Path('AGENTS.md'); s=p.read_text()
a=s.index('## Layout'); b=s.index('## Invariants')
s=s[:a]+'''## Layout

Imports point down this list only; `tests/test_layers.py` holds the exact table.

| where | what |
|---|---|
| `kvexp/util.py` | errors, paths, digests, files, output, what one command knows of itself |
| `kvexp/core/` | tensors only: slots, budgets, selection, attention, observation, eviction, decode steps; GPU kernels and graphs in files of their own |
| `kvexp/methods/` | one eviction method per file |
| `kvexp/retrieval/` | methods that keep everything: index, memory, offloading |
| `kvexp/hf/` | Hugging Face: loading, GGUF, fetching, attention hook, cache, calibration |
| `kvexp/generate/` | prefill, evict, decode, beams, log-likelihoods, KL |
| `kvexp/tasks/` | rows to prompts, answers to numbers; no torch, no model |
| `kvexp/lm_eval/` | lm-eval's requests answered with a cache that evicts |
| `kvexp/run/` | a command line to recorded runs: settings, prompts, answers, batches, jobs, store, plan |
| `kvexp/results/` | recorded runs as tables, verdicts, figures, the report, W&B; no torch |
| `kvexp/diagnose/` | why a run lost quality |
| `kvexp/engines/` | traces for other engines; transformers' custom_generate |
| `kvexp/cli.py` | the command `kvexp` |
| `conf/` | every option of the command line |
| `experiments/` | the papers' figures and tables; `studies/`: league, causes, scale of KL, yardstick, testbed |
| `tests/` | `reference.py`, `oracles.py`, `planted.py` are truths written independently of the core; `frozen/`: what a refactoring may not move |

Three nouns lead: **run** (what is recorded: `kvexp/run/batches.py`), **cache** (what is kept: `kvexp/core/eviction.py`,
`kvexp/hf/cache.py`), **table** (what is judged: `kvexp/results/table.py`).

'''+s[b:]
s=s.replace('core, methods and models import with','core, methods and hf import with')
s=s.replace('    make check                              ','    make frozen                             # a refactoring moved no number and no identity\n    make check                              ') if 'make frozen' not in s else s
p.write_text(s)
p=Path('README.md'); s=p.read_text()
a=s.index('## Where things are'); b=s.index('Imports point one way',a)
s=s[:a]+'''## Where things are

    kvexp/core/          tensors only: slots, budget, selection, eviction, observation
    kvexp/methods/       one eviction method per file
    kvexp/retrieval/     methods that keep everything
    kvexp/hf/            the only place that knows Hugging Face
    kvexp/generate/      prefill, evict, decode, log-probabilities
    kvexp/tasks/         rows to prompts, answers to numbers
    kvexp/run/           a command line to recorded runs
    kvexp/results/       recorded runs as tables, figures, pages
    conf/                every option of the command line, one file each
    experiments/         the papers' figures and tables; studies
    benchmarks/          speed and memory
    tests/               with truths written independently of the core

'''+s[b:]
p.write_text(s)
p=Path('CONTRIBUTING.md'); s=p.read_text()
s=s.replace('''`ALLOWED` in `tests/test_layers.py` is the list; a new layer needs a line
  there, and a reason in review.''','''`LAYERS` in `tests/test_layers.py` is the list.''')
p.write_text(s)
