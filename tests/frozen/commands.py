"""The command lines of the frozen recording: what they write today, they must write after a refactoring.

`RUNS`: name -> words of `run.py`; every one gets a folder of outputs. `BEFORE`: what must stand before them.
`TABLES`: name -> words of `kvexp`, of a folder that a run made. `IDENTITIES`: command lines that are only composed.
"""

# ruff: noqa: E501  # a table of command lines

import json
from pathlib import Path, PurePosixPath

import adapter

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures"

# Methods that came after the recording: more rows in a step move the seventh digit of testbed_gqa's KL (DECISIONS.md, "A row's
# numbers do not depend on its neighbours").
NEWER = ("attention_matching", "cam", "capkv", "d2o", "defensivekv", "epikv", "gkv", "vase")
# openvino: these prompts have too few of its blocks of 32.
METHODS = sorted(set(adapter.options("method")) - {"openvino", *NEWER})
EVICT_BY_ATTENTION = "h2o,keyformer,snapkv"
SUMMARY = ["task=testbed_summary", "limit=3"]
NEEDS_KEYS_WITH_ROPE = ("qfilters", "triattention")  # refused on ALiBi
BATCH_OF_ONE = ("h2o_keyformer_paper",)  # sums scores over the rows of a batch
SURROGATE = ("kvzap",)  # trained for model=tiny alone


def _methods(*without):
    return "method=" + ",".join(name for name in METHODS if name not in without)


def _gqa(*words, ratio=True):
    return ["-m", "model=testbed_gqa", *SUMMARY, *(["kv_ratio=0.4"] if ratio else []), *words]


BEFORE = {
    **{
        f"calibrate_{model}": ["calibrate", f"model={model}", "tokens=128", "sequences=2"]
        for model in ("testbed_rope", "testbed_gqa", "tiny")
    },
    "surrogate_tiny": ["train-surrogate", "model=tiny", "tokens=40"],
}

RUNS = {
    # every method on three layouts of heads and positions
    "methods_rope": ["-m", "model=testbed_rope", *SUMMARY, "kv_ratio=0.4", _methods(*SURROGATE, *BATCH_OF_ONE)],
    "methods_alibi": ["-m", "model=testbed_alibi", *SUMMARY, "kv_ratio=0.4", _methods(*SURROGATE, *BATCH_OF_ONE, *NEEDS_KEYS_WITH_ROPE)],
    "methods_gqa": _gqa(_methods(*SURROGATE, *BATCH_OF_ONE)),
    "methods_of_one": _gqa("method=h2o_c,h2o_keyformer_paper", "batch_size=1"),
    "surrogate": ["-m", "model=tiny", "task=sample", "task.nll=false", "limit=1", "method=kvzap", "kv_ratio=0.3,0.6"],
    "learned": ["-m", "model=testbed_learned", *SUMMARY, "method=h2o,streaming_llm,keyformer", "kv_ratio=0.3", "cache.positions=original"],
    # budgets
    "budget_sequence": _gqa("method=h2o,window", "budget=sequence"),
    "budget_tokens": _gqa("method=h2o,tova", "budget=tokens", "budget.tokens=80", ratio=False),
    "budget_threshold": _gqa("method=h2o,keyformer", "budget=threshold", "budget.threshold=0.001", ratio=False),
    "heads_adaptive": _gqa(f"method={EVICT_BY_ATTENTION},knorm", "budget.heads=adaptive"),
    "heads_global": _gqa("method=h2o,snapkv", "budget.heads=global"),
    "heads_union": _gqa("method=h2o,snapkv,knorm", "budget.heads=union"),
    "heads_duo": _gqa("method=streaming_llm,h2o", "budget.heads=duo", "budget.stream_sinks=4", "budget.stream_recent=32"),
    "layers": _gqa("method=h2o,snapkv", "budget.layers=pyramid,cake"),
    "bytes": ["-m", "model=testbed_gqa", *SUMMARY, "method=h2o", "bytes_ratio=0.3", "cache.bits=16,4"],
    # the cache's settings
    "bits": _gqa("method=h2o,full", "cache.bits=8,4,2"),
    "bits_keys": _gqa("method=h2o", "cache.key_bits=4", "cache.value_bits=2", "cache.residual=16", "cache.symmetric=true"),
    "mode": _gqa("method=h2o,keyformer", "cache.mode=overwrite,compact,mask"),
    "positions": _gqa("method=h2o,streaming_llm", "cache.positions=original,renumbered"),
    "cadence": _gqa("method=h2o,tova", "cache.evict_every=1,4,null"),
    "late": _gqa("method=h2o,keyformer", "cache.evict_at_prefill=false"),
    "naive": _gqa("method=h2o,keyformer,a2sf", "cache.observe=naive"),
    "chunks": _gqa("method=snapkv,h2o", "select.by=chunk"),
    "critical": _gqa("method=snapkv,expected_attention", "select.values=critical"),
    "bounded": _gqa("method=h2o,streaming_llm,keydiff", "prefill=bounded", "prefill.chunk=64", "batch_size=1"),
    "offload": _gqa("method=pqcache,infllm,quest,sparq"),
    # ways of generating
    "beams": _gqa("method=h2o,keyformer", "generation=beam4"),
    "sampling": _gqa("method=h2o,keyformer,full", "generation=sampling"),
    "alone_1": _gqa("method=h2o,keyformer,full", "batch_size=1", "hydra/launcher=basic"),
    "alone_8": _gqa("method=h2o,keyformer,full", "batch_size=8", "hydra/launcher=basic"),
    "forced_reference": _gqa("method=h2o,snapkv", "divergence_text=both"),
    "only_divergence": _gqa("method=h2o,snapkv", "divergence=only"),
    "parts": _gqa("method=h2o", "shard=1/2"),
    # tasks: turns, spans, questions, choices, data sets
    "dialogue": ["-m", "model=testbed_gqa", "task=testbed_dialogue", "limit=2", "method=h2o,streaming_llm", "kv_ratio=0.4"],
    "questions": ["-m", "model=testbed_gqa", "task=testbed_qa", "limit=4", "method=h2o,snapkv", "kv_ratio=0.4", "questions=all,each", "task.question=after_eviction"],
    "needle": ["-m", "model=testbed_gqa", "task=testbed_needle", "limit=4", "method=h2o,pqcache", "kv_ratio=0.3"],
    "choice": ["-m", "model=testbed_gqa", "task=testbed_choice", "limit=4", "method=h2o,keyformer", "kv_ratio=0.4"],
    "lm_eval": ["-m", "model=tiny", "task=lm_eval", "task.tasks=[piqa,copa]", f"task.data_dir={FIXTURES / 'lm_eval'}", "limit=2", "method=h2o,a2sf", "kv_ratio=0.4"],
    "lm_eval_row_mask": ["-m", "model=tiny", "task=lm_eval", "task.tasks=[piqa]", f"task.data_dir={FIXTURES / 'lm_eval'}", "limit=2", "protocol=a2sf", "method=a2sf", "kv_ratio=0.4"],
    "xsum": ["-m", "model=tiny", "task=xsum", f"task.data_files={FIXTURES / 'xsum.jsonl'}", "limit=1", "task.max_new_tokens=4", "method=h2o", "kv_ratio=0.4"],
    "soda": ["-m", "model=tiny", "task=soda", f"task.data_files={FIXTURES / 'soda.jsonl'}", "limit=1", "task.max_new_tokens=4", "method=h2o", "kv_ratio=0.4"],
    "longbench": ["-m", "model=tiny", "task=longbench", "task.subset=qasper", f"task.data_files={FIXTURES / 'longbench' / 'qasper.jsonl'}", "limit=1", "task.max_new_tokens=4", "method=h2o", "kv_ratio=0.4"],
    "perplexity": ["-m", "model=tiny", "task=perplexity", f"task.data_files={FIXTURES / 'perplexity.jsonl'}", "limit=1", "method=streaming_llm", "budget=tokens", "budget.tokens=32"],
    "log": ["model=testbed_gqa", *SUMMARY, "kv_ratio=0.4", "method=h2o", "diagnose=log"],
    # the real model
    "real": ["-m", "limit=2", "task.max_new_tokens=16", "method=h2o,keyformer", "kv_ratio=0.3"],
    "real_instructions": ["-m", "task=instructions", "limit=1", "task.max_new_tokens=8", "method=h2o", "kv_ratio=0.4", "keep=null,fair"],
}  # fmt: skip

TABLES = {
    "table_methods": ["results", "{out}/methods_gqa"],
    "table_kl": ["results", "{out}/methods_gqa", "--view", "divergence"],
    "table_divergence": ["results", "{out}/methods_gqa", "--view", "divergence", "--measure"],
    "table_retrieval": ["results", "{out}/offload"],
    "table_questions": ["results", "{out}/questions", "--view", "questions"],
    "table_longbench": ["results", "{out}/longbench", "--view", "longbench"],
    "table_chunks": ["results", "{out}/bounded", "--view", "chunks"],
    "table_real": ["results", "{out}/real"],
    "table_lm_eval": ["results", "{out}/lm_eval"],
}

_CONF = ROOT / "conf" / "experiment"
_EXPERIMENTS = [
    *json.loads((ROOT / "conf" / "experiments.json").read_text()),
    *(path.stem for path in _CONF.glob("*.yaml")),
]
IDENTITIES = {
    **{
        f"experiment={'.'.join(path.with_suffix('').parts)}": ["-m", f"experiment={path.with_suffix('')}"]
        for number, path in enumerate(sorted(PurePosixPath(f"{name}.yaml") for name in _EXPERIMENTS))
        if path.parent.name != "paper" or number % 4 == 0  # the papers' own scale: mostly other data
    },
    **{f"task={name}": ["-m", f"task={name}", "method=full,h2o"] for name in adapter.options("task")},
    **{f"method={name}": ["-m", f"method={name}", "model=testbed_rope,testbed_gqa", *SUMMARY] for name in METHODS},
}
