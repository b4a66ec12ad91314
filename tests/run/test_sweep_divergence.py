"""Divergence within a sweep: after the prefill that the runs share, beside their rows, no part of their identity."""

from __future__ import annotations

import dataclasses
import itertools
import json
from types import SimpleNamespace

import pytest
from commands import settings as composed_settings

import kvexp.generate
import kvexp.run.batches as batch
from kvexp.run.batches import measure_claimed, measure_rest, prefill_groups, run_group
from kvexp.run.labels import DivergenceOptions, decided
from kvexp.run.session import Session
from kvexp.run.store import DIVERGENCE, NUMBERS, TEXTS, run_hash, runs
from kvexp.util.errors import ConfigError

SUMMARY = ("task=testbed_summary", "task.max_new_tokens=8", "limit=4")
ONE_BY_ONE = (*SUMMARY, "batch_size=1")
QUESTIONS = ("task=testbed_qa", "task.question=after_eviction", "task.max_new_tokens=5", "limit=4", "batch_size=3")


def settings(outputs, method, *overrides):
    typed = ["kv_ratio=0.3", *overrides]
    return composed_settings("model=testbed_rope", f"outputs_dir={outputs}", f"method={method}", *typed, typed=typed)


def group(outputs, *overrides, methods=("h2o", "keyformer", "window")):
    (members,) = prefill_groups([settings(outputs, method, *overrides) for method in methods])
    return members


@pytest.fixture
def command(stage, tmp_path):
    """command(*words) -> (exit code, what both streams said) of run.py in a process of its own."""
    logs = (tmp_path / f"log{number}" for number in itertools.count())
    return lambda *words: stage.run([*words, "model=testbed_rope"], next(logs), COLUMNS="160")


def lines_of(outputs):
    return {(run.hash, *key): line for run in runs(outputs) for key, line in run.divergence().items()}


def assert_alike(one, other):
    assert one.keys() == other.keys() and one
    for key, line in one.items():
        same = {name: line[name] for name in ("tokens", "index", "text", "first_by_prefill", "same_top1")}
        assert same == {name: other[key][name] for name in same}
        for name in NUMBERS:
            assert line[name] == pytest.approx(other[key][name], abs=2e-5), (key, name)


@pytest.fixture
def prefills(monkeypatch):
    """The number of runs in each shared prefill."""
    import kvexp.generate

    found, original = [], kvexp.generate.prefill_together
    watched = lambda *call, **more: found.append(len(call[2])) or original(*call, **more)  # noqa: E731
    monkeypatch.setattr(kvexp.generate, "prefill_together", watched)
    return found


SINGLE = pytest.param(ONE_BY_ONE, id="single", marks=pytest.mark.slow)
BATCH = pytest.param((*SUMMARY, "batch_size=3"), id="batch")


@pytest.mark.parametrize("task", [SINGLE, BATCH, pytest.param(QUESTIONS, id="questions")])
def test_it_shares_the_prefill_and_finds_what_a_pass_by_itself_finds(tmp_path, prefills, task):
    run_group(group(tmp_path, *task, "divergence_text=both"), Session())
    assert set(prefills) == {4}
    made = lines_of(tmp_path)
    assert len(made) == 3 * 2 * 4
    full = next(run for run in runs(tmp_path) if run.labels["method"] == "full")
    written = {row["example"]: row["output_tokens"] for row in full.rows()}
    assert all(line["tokens"] == written[name] for (_, name, text), line in made.items() if text == "own")
    assert all(line["first_by_prefill"] is (task is not QUESTIONS) for line in made.values())
    for run in runs(tmp_path):
        (run.path / DIVERGENCE).unlink(missing_ok=True)
    assert not measure_claimed(list(runs(tmp_path)), TEXTS)
    assert_alike(made, lines_of(tmp_path))


def test_rows_are_those_of_a_sweep_without_it(tmp_path):
    for name, asked in (("with", "true"), ("without", "false")):
        run_group(group(tmp_path / name, *SUMMARY, f"divergence={asked}"), Session())
    rows = [{run.hash: run.rows() for run in runs(tmp_path / name)} for name in ("with", "without")]
    assert rows[0] == rows[1] and len(rows[0]) == 4
    assert not lines_of(tmp_path / "without")


def test_what_is_missing_is_added_and_nothing_is_made_twice(tmp_path, prefills):
    members = group(tmp_path, *ONE_BY_ONE)
    run_group([dataclasses.replace(m, divergence=DivergenceOptions()) for m in members], Session())
    rows = {file: file.read_bytes() for file in tmp_path.glob("*/examples.jsonl")}
    prefills.clear()
    run_group(members, Session())
    assert prefills == [4] * 4, "one prefill per prompt, of the three runs and the full cache"
    made = lines_of(tmp_path)
    file = next(tmp_path.glob(f"{run_hash(members[1].identity)}/divergence.jsonl"))
    whole = file.read_text().splitlines(keepends=True)
    file.write_text("".join(whole[:1] + whole[2:]))
    prefills.clear()
    run_group(members, Session())
    assert prefills == [], "one run alone is left to its own turn"
    measure_rest(members[1], Session())
    assert prefills == [2], "its own turn: the run beside the full cache, for the one example"
    assert_alike(made, lines_of(tmp_path))
    run_group(members, Session())
    measure_rest(members[1], Session())
    assert prefills == [2] and rows == {file: file.read_bytes() for file in tmp_path.glob("*/examples.jsonl")}


def test_only_divergence_makes_no_rows_and_rows_can_follow(tmp_path):
    run_group(group(tmp_path / "a", *SUMMARY, "divergence=only"), Session())
    assert not list(tmp_path.glob("a/*/examples.jsonl"))
    run_group(group(tmp_path / "b", *SUMMARY), Session())
    assert_alike(lines_of(tmp_path / "a"), lines_of(tmp_path / "b"))
    before = {file: file.read_bytes() for file in tmp_path.glob("a/*/divergence.jsonl")}
    run_group(group(tmp_path / "a", *SUMMARY), Session())
    assert before == {file: file.read_bytes() for file in tmp_path.glob("a/*/divergence.jsonl")}
    rows = [{run.hash: run.rows() for run in runs(tmp_path / name)} for name in "ab"]
    assert rows[0] == rows[1]


def test_no_part_of_identity_or_labels(tmp_path):
    plain = settings(tmp_path, "h2o", *SUMMARY)
    words = ("divergence=only", "divergence_text=both", "epsilon_kl=0.01", "epsilon_top1=0.1")
    other = settings(tmp_path, "h2o", *SUMMARY, *words)
    assert run_hash(plain.identity) == run_hash(other.identity) and plain.labels == other.labels
    assert plain.divergence.texts == ("own",) and other.divergence == DivergenceOptions(("own", "reference"), True)


def test_seeds_of_a_group_stay_apart(tmp_path):
    """Runs of one baseline and two seeds: Keyformer's noise is the run's own, measured in company or afterwards."""
    pair = [settings(tmp_path, "keyformer", *SUMMARY, f"seed={seed}") for seed in (0, 1)]
    for each in prefill_groups(pair):
        run_group(each, Session())
    made = lines_of(tmp_path)
    kl = [[line["kl"] for key, line in made.items() if key[0] == run_hash(one.identity)] for one in pair]
    assert kl[0] != kl[1]
    for run in runs(tmp_path):
        (run.path / DIVERGENCE).unlink(missing_ok=True)
    measure_claimed(list(runs(tmp_path)), ["own"])
    assert_alike(made, lines_of(tmp_path))


@pytest.mark.parametrize("task", [SINGLE, BATCH])
def test_what_is_decoded_is_written_before_the_next_is(tmp_path, prefills, monkeypatch, task):
    """Each run by itself, each text by itself: rows and lines are those of all together."""
    words = (*task, "divergence_text=both")
    run_group(group(tmp_path / "whole", *words), Session())
    monkeypatch.setattr("kvexp.run.batches.MAX_UNWRITTEN_ROWS", 1)
    there, original = [], kvexp.generate.decode_batches

    def decode(*given, **named):
        there.append(sum(len(run.rows()) for run in runs(tmp_path / "parts")))
        return original(*given, **named)

    monkeypatch.setattr(kvexp.generate, "decode_batches", decode)
    prefills.clear()
    run_group(group(tmp_path / "parts", *words), Session())
    batches, size = (4, 1) if task is ONE_BY_ONE else (2, 3)
    assert len(prefills) == batches, "no prompt is read twice"
    assert there[:4] == [0, size, 2 * size, 3 * size]
    assert_alike(lines_of(tmp_path / "whole"), lines_of(tmp_path / "parts"))

    def rows(folder):
        left = ("seconds", "halved")
        return {
            (run.hash, row["example"]): {k: v for k, v in row.items() if k not in left}
            for run in runs(folder)
            for row in run.rows()
        }

    assert {key: row["output"] for key, row in rows(tmp_path / "whole").items()} == {
        key: row["output"] for key, row in rows(tmp_path / "parts").items()
    }


@pytest.mark.parametrize(
    ("asked", "made"), [("true", (4, 3)), ("only", (0, 3)), pytest.param("false", (4, 0), marks=pytest.mark.slow)]
)
def test_prompts_that_take_long_are_written_before_the_next_is_read(tmp_path, monkeypatch, asked, made):
    """Three runs and the full cache; on so slow a core a prompt takes over a minute."""
    monkeypatch.setattr(batch, "CORE_FLOPS", 1.0)
    there, original = [], kvexp.generate.prefill_together

    def prefill(*given, **named):
        there.append((sum(len(run.rows()) for run in runs(tmp_path)), len(lines_of(tmp_path))))
        return original(*given, **named)

    monkeypatch.setattr(kvexp.generate, "prefill_together", prefill)
    run_group(group(tmp_path, *ONE_BY_ONE, f"divergence={asked}"), Session())
    assert there == [(made[0] * prompt, made[1] * prompt) for prompt in range(4)]


def test_a_run_alone_is_forced_texts_prompt_by_prompt(tmp_path, monkeypatch):
    (run,) = [one for one in group(tmp_path, *ONE_BY_ONE, methods=("h2o",)) if not one.is_baseline]
    monkeypatch.setattr(batch, "CORE_FLOPS", 1.0)
    there, original = [], kvexp.generate.prefill_together
    watched = lambda *call, **more: there.append(len(lines_of(tmp_path))) or original(*call, **more)  # noqa: E731
    monkeypatch.setattr(kvexp.generate, "prefill_together", watched)
    measure_rest(dataclasses.replace(run, divergence=DivergenceOptions(("own",), True)), Session())
    assert there == [0, 1, 2, 3] and len(lines_of(tmp_path)) == 4


def test_an_example_without_a_row_is_forced_nothing(tmp_path, prefills):
    members = group(tmp_path, *ONE_BY_ONE, methods=("h2o",))
    run_group([dataclasses.replace(m, divergence=DivergenceOptions()) for m in members], Session())
    file = tmp_path / run_hash(members[1].identity) / "examples.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[2] |= {"skipped": "too long", "metrics": {}}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prefills.clear()
    measure_rest(members[1], Session())
    measure_rest(members[1], Session())
    assert prefills == [2, 2, 2] and len(lines_of(tmp_path)) == 3


def test_what_goes_wrong_in_its_own_turn_is_said(tmp_path, monkeypatch, capsys):
    def broken(*_, **__):
        raise ConfigError("no such thing")

    members = group(tmp_path, *ONE_BY_ONE, methods=("h2o",))
    monkeypatch.setattr(batch, "outputs_of_batches", broken)
    measure_rest(members[1], Session())
    assert "divergence of h2o 0.3" in (told := capsys.readouterr().err) and "no such thing" in told


def test_reasons_that_differ_in_numbers_alone_are_told_once(tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "skipped_row", lambda *_: {"example": ""})
    _, run = group(tmp_path, *ONE_BY_ONE, "divergence=only", methods=("h2o",))
    member = batch.Member(run, SimpleNamespace(rows=list, divergence=dict), [])
    reasons = ("budget of 4 slots", "budget of 5 slots", "a window")
    list(member.skip([(0, SimpleNamespace(skipped=reason, example=SimpleNamespace(id="a"))) for reason in reasons]))
    assert list(member.skipped.values()) == ["budget of 4 slots", "a window"]


def test_why_an_example_is_forced_nothing_is_said_where_there_are_no_rows(tmp_path, capsys):
    _, run = group(tmp_path, *ONE_BY_ONE, "divergence=only", "kv_ratio=0.0172", methods=("streaming_llm",))
    measure_rest(run, Session())
    assert "3 KL passes were not made (budget of 4 slots cannot hold sink=4" in capsys.readouterr().err
    assert len(lines_of(tmp_path)) == 1, "the longest prompt alone has five slots"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("divergence=maybe",), "divergence must be true or false or one of auto, only"),
        (("divergence_text=all",), "own, reference, both"),
        (("epsilon_kl=0",), "epsilon_kl must be above 0, got 0"),
        (("epsilon_top1=x",), "epsilon_top1"),
        (("divergence=only", "generation=sampling"), "sampled answers differ by chance"),
        (("divergence=only", "generation=beam4"), "beams take over one another's caches"),
        (("divergence=only", "generation.prefill_chunk=64"), "generation.prefill_chunk=null"),
        (("divergence=only", "task=testbed_choice"), "flips and divergence over choices come from the rows"),
    ],
)
def test_mistakes_are_told_before_a_model_loads(tmp_path, words, why):
    with pytest.raises(ConfigError, match=why):
        settings(tmp_path, "h2o", *words)


def test_a_run_that_could_force_nothing_fails(command, tmp_path):
    few = ("task=testbed_summary", "task.max_prompt_tokens=120", "limit=2", "divergence=only")
    code, said = command("-m", "method=h2o,window", *few, f"outputs_dir={tmp_path / 'out'}")
    assert code == 1, said
    assert "2 KL passes were not made" in said and "no KL pass was made, so the run has no divergence" in said
    assert "2 run(s) failed" in said


def test_the_command_prints_the_table_and_what_has_none(command, tmp_path):
    few = ("task=testbed_summary", "task.max_new_tokens=4", "limit=2", f"outputs_dir={tmp_path / 'out'}")
    code, said = command("-m", "method=h2o,window", "kv_ratio=0.3,0.5", *few)
    assert code == 0, said
    assert "KL to" in said and "2 examples: a first look" in said and "no divergence of" not in said
    code, said = command("method=h2o", *few, "generation=beam4", "divergence=true")
    assert code == 0 and "no divergence of h2o 0.5" in said
    code, said = command("-m", "method=h2o,window", "task=testbed_choice", "limit=2", few[-1])
    assert code == 0 and "no divergence" not in said


def test_a_single_run_measures_it_where_that_is_asked_for(command, tmp_path):
    out = tmp_path / "out"
    words = ("method=h2o", "task=testbed_summary", "task.max_new_tokens=4", "limit=2", f"outputs_dir={out}")
    code, said = command(*words)
    assert code == 0, said
    assert "full cache    " in said and "h2o, 50 % of the cache" in said, "both answers"
    assert "KL to the full cache was not measured: divergence=true" in said and not lines_of(out)
    rows = {run.hash: run.rows() for run in runs(out)}
    code, said = command("-m", *words)  # of one job: its turn finds the rows
    assert code == 0 and "KL to " in said and "was not measured" not in said, said
    assert len(lines_of(out)) == 2 and rows == {run.hash: run.rows() for run in runs(out)}
    code, said = command(*words)  # what is measured is shown, by whatever command
    assert code == 0 and "KL to " in said and "was not measured" not in said


@pytest.mark.parametrize(
    ("asked", "of_a_sweep", "of_one_run"),
    [("auto", True, False), (True, True, True), (False, False, False), ("only",) * 3],
)
def test_auto_tells_a_sweep_from_a_single_run(asked, of_a_sweep, of_one_run):
    assert decided({"divergence": asked}, [], sweep=True) == of_a_sweep
    assert decided({"divergence": asked}, [], sweep=False) == of_one_run


def test_a_text_that_nothing_is_forced_is_refused():
    config = {"divergence": "auto", "divergence_text": "both"}
    with pytest.raises(ConfigError, match=r"divergence_text=both has no effect.*add divergence=true"):
        decided(config, ["method=h2o", "divergence_text=both"], sweep=False)
    assert decided(config, ["divergence_text=both"], sweep=True) is True
    assert decided(config, ["method=h2o"], sweep=False) is False
    assert decided(config | {"divergence": True}, ["divergence_text=both"], sweep=False) is True
    assert decided({}, [], sweep=True) is False  # configurations of before know no divergence
