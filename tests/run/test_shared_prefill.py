"""The launcher that groups a sweep: the same rows, folders, verdicts and failures as one run after the other."""

from __future__ import annotations

import functools
import itertools
import json
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import settings as composed_settings
from faults.stage import TWO_THREADS
from small import small

import kvexp.run.batches as together
import kvexp.run.rows as memory
from kvexp.hf import EvictionCache
from kvexp.run.labels import CONTROL, with_controls
from kvexp.run.plan import PlannedGroup, _planned, workload_of
from kvexp.run.session import Session
from kvexp.run.store import runs

ROOT = Path(__file__).resolve().parents[2]
SWEEP = ("method=h2o,keyformer,a2sf,oracle", "kv_ratio=0.3,0.5")
THREE = ("h2o", "keyformer", "a2sf")
SHORT = ("task.max_new_tokens=4", "task.continuation_words=3")  # of task=sample: a forward per byte of a continuation


@pytest.fixture
def command(stage, tmp_path):
    """command(*words, threads=1) -> (exit code, what both streams said) of run.py in a process of its own."""
    logs = (tmp_path / f"log{number}" for number in itertools.count())
    return lambda *words, threads=1: stage.run(words, next(logs), TWO_THREADS if threads == 2 else "")


def settings(outputs, method, *overrides):
    words = (f"task.data_files={ROOT}/conf/task/sample.jsonl", f"outputs_dir={outputs}", f"method={method}")
    return composed_settings("limit=3", *SHORT, *words, "divergence=false", *overrides)


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


KEPT = ("keep=prompt", "budget.of=generated")


@pytest.mark.parametrize(
    ("jobs", "controls"),
    [
        ([("method=gkv", "kv_ratio=0.5", *KEPT), ("method=rkv", "method.window=4", "kv_ratio=0.5", *KEPT)], 1),
        ([("method=gkv", f"kv_ratio={ratio}", *KEPT) for ratio in (0.2, 0.5)], 2),
        ([("method=gkv", "kv_ratio=0.5")], 0),
        ([("method=full", *KEPT)], 0),
        ([("method=gkv", "control=false", *KEPT)], 0),
        ([("method=gkv", *KEPT), ("method=random", *KEPT)], 0),
    ],
)
def test_sweeps_that_keep_the_prompt_get_random_slots_at_the_same_budgets(jobs, controls):
    batches = [list(map(list, jobs[:1])), list(map(list, jobs[1:]))] if len(jobs) > 1 else [list(map(list, jobs))]
    last = with_controls(batches[-1], [job for batch in batches for job in batch])
    added = last[len(batches[-1]) :]
    assert last[: len(batches[-1])] == batches[-1] and len(added) == controls
    rest = list(dict.fromkeys(tuple(w for w in job if not w.startswith("method")) for job in jobs))
    assert added == [[*CONTROL, *words] for words in rest[:controls]]


def filled(outputs, *methods):
    """Run these methods as one group and return what that leaves."""
    together.run_group(together.prefill_groups([settings(outputs, method) for method in methods])[0], Session())
    return content(outputs)


def content(folder):
    """Everything a sweep leaves but times and halvings, by run and example; and each run's configuration and end.

    Metrics and log-probabilities to five digits: another batch rounds float32 sums otherwise.
    """
    made = {}
    for run in runs(folder):
        left = ("seconds", "halved")
        rows = {row["example"]: rounded({k: v for k, v in row.items() if k not in left}) for row in run.rows()}
        made[run.hash] = (run.config, run.labels, run.baseline, run.finished, rows)
    return made


SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
LATER = ("task=testbed_qa", "task.question=after_eviction", "limit=4", "batch_size=3")


@pytest.mark.parametrize(
    ("sweep", "task"),
    [
        (("method=keyformer,oracle", "kv_ratio=0.3"), LATER),
        pytest.param(SWEEP, ("task=testbed_choice", "limit=3"), marks=pytest.mark.slow),
    ],
)
def test_rows_are_those_of_one_run_after_the_other(command, tmp_path, sweep, task):
    both = {}
    for launcher in ("shared_prefill", "basic"):
        out, where = tmp_path / launcher, f"hydra/launcher={launcher}"
        code, said = command("-m", where, *sweep, *task, "model=testbed_rope", f"outputs_dir={out}")
        assert code == 0, said
        both[launcher] = content(out)
        told = "and the full cache that share each prompt's prefill" in said
        assert told == (launcher == "shared_prefill")
    assert len(both["basic"]) == (9 if sweep is SWEEP else 3)
    assert both["shared_prefill"] == both["basic"]
    times = [row["seconds"]["ttft"] for run in runs(tmp_path / "shared_prefill") for row in run.rows()]
    assert set(times) == {None}


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
def test_processes_side_by_side_write_the_same_rows(command, tmp_path):
    """Two threads: two processes with one thread each."""
    words = ("-m", "method=h2o,keyformer", "kv_ratio=0.3", "task=testbed_summary", "limit=7", "batch_size=2")
    words, work = (*words, "model=testbed_rope"), "7 prompts, 21 answers, 14 KL passes"
    for threads in (1, 2):
        code, said = command(*words, f"outputs_dir={tmp_path / str(threads)}", threads=threads)
        assert code == 0, said
        assert (f"prefill, in 2 processes: {work}" in said) is (threads == 2)
    assert content(tmp_path / "1") == content(tmp_path / "2") and len(content(tmp_path / "1")) == 3


def test_batches_decode_together_and_write_what_they_write_alone(tmp_path, monkeypatch, capsys):
    """Three prompts in one group of batches, in groups of one, and one after the other where the group runs out."""
    monkeypatch.setattr(together, "MAX_DECODE_ROWS", 64)
    groups, original = [], together.outputs_of_batches
    monkeypatch.setattr(together, "outputs_of_batches", lambda *a: groups.append(len(a[2])) or original(*a))

    whole = filled(tmp_path / "together", *THREE)
    assert groups == [3]
    monkeypatch.setattr(together, "MAX_DECODE_ROWS", 1)
    assert filled(tmp_path / "alone", *THREE) == whole and groups == [3, 1, 1, 1]
    monkeypatch.setattr(together, "MAX_DECODE_ROWS", 64)

    def short(model, tokenizer, batches, pace):
        if len(batches) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return original(model, tokenizer, batches, pace)

    monkeypatch.setattr(together, "outputs_of_batches", short)
    assert "too little memory" not in capsys.readouterr().err
    assert filled(tmp_path / "short", *THREE) == whole
    assert capsys.readouterr().err.count("too little memory for all at once: in parts, which is slower") == 1


def test_groups_of_batches_are_even_and_enough_for_all_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(together, "MAX_DECODE_ROWS", 64)
    members = [SimpleNamespace(settings=settings(tmp_path, "h2o"))] * 20

    def sizes(batches, processes):
        return [len(group) for group in together.decode_groups([[]] * batches, members, processes)]

    assert sizes(6, 2) == [3, 3] and sizes(7, 2) == [1, 2, 2, 2] and sizes(1, 2) == [1]
    assert sizes(7, 1) == [2, 2, 3]


def test_slow_prompts_begin_one_by_one_and_are_as_few_together_as_costs_little():
    """Six prompts of 919 tokens and 20 rows of 24 new ones on SmolLM2-135M; then one that takes over half a minute."""
    cost = together.batch_cost(134_515_008, 919 + 20 * 24, 24, 1)
    assert cost[0] == pytest.approx(9.4, abs=0.1) and cost[1] == pytest.approx(0.154, abs=0.001)
    assert together.group_sizes(6, 2, 6) == [3, 3] and together.group_sizes(6, 2, 6, 0.9, 0.2) == [3, 3]
    assert together.group_sizes(6, 2, 6, *cost) == [1, 1, 2, 2] and together.group_sizes(6, 1, 6, *cost) == [1, 2, 3]
    assert together.group_sizes(6, 2, 6, 31, 0.3) == [1] * 6 and together.group_sizes(1, 2, 6, *cost) == [1]


def test_how_many_processes(tmp_path, monkeypatch):
    """As many as there are threads, or one: where some would have no work or no memory, or where time is limited."""
    asked, found, needs = [], [], memory.kv_bytes_needed
    monkeypatch.setattr(memory, "kv_bytes_needed", lambda *call: found.append(needs(*call)) or found[-1])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)

    class Asked(BaseException):
        """Ends the group before it works."""

    def pool(size, _):
        asked.append(size)
        raise Asked

    monkeypatch.setattr(together, "ForkPool", pool)

    def made(name, *overrides):
        members = [settings(tmp_path / name, m, *overrides) for m in ("h2o", "a2sf")]
        with pytest.raises(Asked):
            together.run_group(together.prefill_groups(members)[0], Session())
        return asked.pop()

    linux = sys.platform == "linux"
    assert made("three", "limit=3") == made("five", "limit=5") == (3 if linux else 1)
    assert made("two", "limit=2") == made("four", "limit=4") == 1
    if linux:
        prompts, each = found[0]
        for processes in (3, 2.9):
            free = processes * (prompts + sum(each)) / memory.SHARE + 1
            monkeypatch.setattr(memory, "free_bytes", lambda model, free=free: free)
            assert made(f"memory for {processes}", "limit=3") == (3 if processes == 3 else 1)


def test_a_sweep_goes_on_from_what_is_there(tmp_path):
    """Rows of some runs exist, one run is complete: nothing is made twice, nothing is missing."""
    (members,) = together.prefill_groups([settings(tmp_path, method) for method in THREE])
    assert [m.labels["method"] for m in members] == ["full", "h2o", "keyformer", "a2sf"]
    together.run_group(members, Session())
    whole = content(tmp_path)
    for number, run in enumerate(runs(tmp_path)):
        file = run.path / "examples.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(lines[: number % 4]))
    left = sum(len(run.rows()) for run in runs(tmp_path))
    assert 0 < left < 12
    together.run_group(members, Session())
    assert content(tmp_path) == whole
    assert sum(len((run.path / "examples.jsonl").read_text().splitlines()) for run in runs(tmp_path)) == 12


def test_a_run_that_cannot_be_fails_alone(command, tmp_path):
    out = tmp_path / "out"
    words = small("limit=2", *SHORT, f"outputs_dir={out}")
    code, said = command("-m", *words, "method=h2o,streaming_llm,a2sf", "budget=tokens", "budget.tokens=4,40")
    assert code == 1
    assert "1 run(s) failed" in said and "cannot hold sink=4" in said
    rows = {(run.labels["method"], run.labels["setting"]): len(run.rows()) for run in runs(out)}
    assert (
        rows.pop(("streaming_llm", next(s for m, s in rows if m == "streaming_llm" and "budget.tokens=4 " in s))) == 0
    )
    assert set(rows.values()) == {2} and len(rows) == 6


def test_half_as_many_at_a_time_when_memory_is_short(tmp_path, monkeypatch):
    sizes, original = [], together.outputs_of_batches
    monkeypatch.setattr(together, "MAX_DECODE_ROWS", 1)

    def greedy(model, tokenizer, batches, pace):
        sizes.append(len(batches[0].runs))
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError("out of memory")
        return original(model, tokenizer, batches, pace)

    monkeypatch.setattr(together, "outputs_of_batches", greedy)
    small_parts = filled(tmp_path / "small", *THREE)
    assert sizes[:3] == [4, 2, 2]
    assert {row["halved"] for run in runs(tmp_path / "small") for row in run.rows()} == {1}
    monkeypatch.undo()
    monkeypatch.setattr(together, "MAX_DECODE_ROWS", 1)
    assert filled(tmp_path / "large", *THREE) == small_parts
    monkeypatch.setattr("kvexp.run.rows.free_bytes", lambda model: 1)
    monkeypatch.setattr(
        together, "outputs_of_batches", lambda *given: sizes.append(-len(given[2][0].runs)) or original(*given)
    )
    assert filled(tmp_path / "none", *THREE) == small_parts
    assert set(n for n in sizes if n < 0) == {-1}


def test_half_of_the_batches_when_memory_is_short(tmp_path, monkeypatch):
    """What was freed is given back before it is asked again."""
    sizes, freed, original = [], [], together.outputs_of_batches
    monkeypatch.setattr(together, "fit_together", lambda batches, *_: bool(len(batches) <= 2 and freed))
    monkeypatch.setattr(together, "free_memory", lambda: freed.append(1))
    monkeypatch.setattr(together, "outputs_of_batches", lambda *given: sizes.append(len(given[2])) or original(*given))
    few = filled(tmp_path / "few", *THREE)
    assert max(sizes) == 2 and freed
    monkeypatch.undo()
    assert filled(tmp_path / "all", *THREE) == few


@pytest.mark.parametrize("together_at_once", [1, 64])
def test_one_that_fails_is_named_at_once_and_the_others_go_on(tmp_path, monkeypatch, capsys, together_at_once):
    (members,) = together.prefill_groups([settings(tmp_path, method) for method in THREE])
    monkeypatch.setattr(together, "MAX_DECODE_ROWS", together_at_once)
    calls, original = [], together.outputs_of_batches

    def failing(model, tokenizer, batches, pace):
        asked = [run for one in batches for run in one.runs]
        calls.append(len(asked))
        if any(run.labels["method"] == "keyformer" for run in asked):
            raise IndexError("index 7 is out of bounds")
        return original(model, tokenizer, batches, pace)

    monkeypatch.setattr(together, "outputs_of_batches", failing)
    together.run_group(members, Session())
    told = capsys.readouterr().err
    assert told.count("failed, the other runs go on: IndexError: index 7 is out of bounds") == 1
    assert "keyformer 0." in told and "h2o 0." not in told
    rows = {run.labels["method"]: len(run.rows()) for run in runs(tmp_path)}
    assert rows.pop("keyformer") == 0 and set(rows.values()) == {max(rows.values())} and min(rows.values()) > 0
    assert max(calls) > 1, "they were tried together"


def test_what_shares_no_prompt_is_in_no_group(tmp_path):
    here = [settings(tmp_path, "h2o"), settings(tmp_path, "h2o", "seed=1"), settings(tmp_path, "a2sf", "batch_size=2")]
    assert [len(group) for group in together.prefill_groups(here)] == [2, 2, 2]
    beams = settings(tmp_path, "h2o", "generation=beam4")
    whole = settings(tmp_path, "h2o", "method.score_batch=sum_all")
    chunks = settings(tmp_path, "h2o", "generation.prefill_chunk=8")
    own = settings(tmp_path, "infllm", "method.prefill=blockwise")
    assert together.prefill_groups([beams, whole, chunks, own]) == []
    said = [together.why_alone(each) for each in (beams, whole, chunks, own)]
    assert said[0] == "generation.num_beams=4" and said[1] == "method.score_batch=sum_all of h2o"
    assert said[2] == "generation.prefill_chunk=8" and said[3] == "method=infllm changes the prefill"


def test_a_sweep_says_once_why_it_shares_nothing_and_that_the_task_has_no_more_examples(command, tmp_path):
    words = ("-m", "method=h2o,a2sf", "kv_ratio=0.3", "task=testbed_summary", "task.size=1", "limit=3")
    words = (*words, "model=testbed_rope", "task.max_new_tokens=2", "generation.prefill_chunk=64")
    code, said = command(*words, f"outputs_dir={tmp_path / 'out'}")
    assert code == 0, said
    alone = "2 runs do not share prefills with others, which is slower: generation.prefill_chunk=64"
    few = "limit=3 is more than task=testbed_summary has: 1 example; task.size=N makes more"
    assert said.count(alone) == 1 == said.count(few)


def test_rows_say_nothing_about_time_and_the_table_says_why(command, tmp_path):
    words = small("limit=2", *SHORT, f"outputs_dir={tmp_path / 'out'}")
    code, said = command("-m", *words, "method=h2o,a2sf")
    assert code == 0 and "hydra/launcher=basic" in said
    row = json.loads(next(iter(runs(tmp_path / "out"))).path.joinpath("examples.jsonl").read_text().splitlines()[0])
    assert row["seconds"] == {"ttft": None, "tt2t": None, "tpot": None}


@pytest.mark.parametrize(
    ("task", "divergence", "copies"),
    [
        SLOW((), "divergence=false", 1),
        ((), "divergence=only", 1),
        ((), "divergence=true", 2),
        SLOW((), "divergence=true divergence_text=both", 3),
        SLOW(LATER, "divergence=false", 2),
        SLOW(LATER, "divergence=only", 2),
        (LATER, "divergence=true", 3),
    ],
)
def test_a_plan_counts_every_copy_of_a_cache(tmp_path, monkeypatch, task, divergence, copies):
    monkeypatch.setattr(together, "MAX_DECODE_ROWS", 1)
    live, most, fork, new = weakref.WeakSet(), [0], EvictionCache.fork, EvictionCache.__init__

    def counted(cache):
        live.add(cache)
        most[0] = max(most[0], len(live))
        return cache

    monkeypatch.setattr(EvictionCache, "__init__", lambda self, *a, **given: (new(self, *a, **given), counted(self))[0])
    monkeypatch.setattr(EvictionCache, "fork", lambda self, rows: counted(fork(self, rows)))
    data = (f"task.data_files={ROOT}/conf/task/sample.jsonl", "limit=3", *SHORT)
    words = (*(task or data), f"outputs_dir={tmp_path}", *divergence.split(), "batch_size=3")
    (members,) = together.prefill_groups([composed_settings(*words, f"method={method}") for method in THREE])
    planned = [_planned(each, workload_of(each, {})) for each in members]
    fitted, fits = [], together.fit_together
    monkeypatch.setattr(together, "fit_together", lambda batches, *to: fitted.extend(batches) or fits(batches, *to))
    together.run_group(members, Session())
    assert PlannedGroup(planned).copies == copies
    # Without answers the full cache writes the text first, in one more copy of its own, which the plan does not count.
    assert most[0] == copies * len(members) + (divergence == "divergence=only")
    assert {batch.copies for batch in fitted} == {copies}, "by which batches are fitted into memory"


@pytest.mark.parametrize("method", ["pqcache", "infllm"])
def test_the_copies_in_a_block_cache_count_as_memory(method):
    blocks, none = (composed_settings(f"method={method}", f"method.cache_tokens={size}") for size in (256, 0))
    held = [[memory.slots_held(each, [100, 900], cached=cached) for cached in (False, True)] for each in (none, blocks)]
    assert held[0][0] == held[0][1] == held[1][0]
    assert held[1][1] == [held[0][0][0] + 100, held[0][0][1] + 256]
