"""One screen: a line for every run and few lines around them, in a hundred columns; and progress to be believed."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from report_runs import write

from kvexp.results.read import read_runs
from kvexp.results.report import index, read
from kvexp.results.screen import print_answers, print_screen
from kvexp.results.views import main
from kvexp.results.views import shown as blocks_of
from kvexp.run.store import EPSILON_KL, OWN
from kvexp.util.output import Console
from kvexp.util.progress import ANSWERS, PROMPTS, TEXTS, Progress, worked

AROUND = 6  # lines, the empty ones not counted


def record(
    folder,
    method,
    kv_ratio=None,
    n=24,
    score=40.0,
    kl=None,
    baseline=None,
    evicts=True,
    timed=False,
    load=0.0,
    engine=None,
    heavy=1.0,
    ended="length",
    held=(),
    **labels,
):
    """A run whose scores and divergences differ a little from example to example; heavy: times the first one's KL."""
    receipt = {"kv_bytes": 10, "peak_kv_bytes": 1024 * (10 if baseline is None else 6), "batch_size": 1}
    receipt |= {"first_eviction_step": 0 if evicts and baseline else None, **dict(held)}
    seconds = {"ttft": 0.1, "tpot": 0.01} if timed else {"ttft": None, "tpot": None}
    more = {"output": f"{method} says it " + "and more of it " * 60, "new_tokens": 8, "finish_reason": ended}
    scores = [{"rouge1": score + index % 5, "rouge2": score / 2} for index in range(n)]
    generation = {"generation": {"max_new_tokens": 8, "num_beams": 1}} | ({"engine": engine} if engine else {})
    changes = {"receipt": receipt, "seconds": seconds, "load": load, **more}
    labels = {"kv_ratio": kv_ratio, "setting": "", **labels}
    run = write(folder, method, scores, baseline, changes=changes, config=generation, **labels)
    if kl is not None:
        each = [[kl * (1 + index % 3 / 10) * (1 if index else heavy)] * 4 for index in range(n)]
        same = {"text": OWN, "same_top1": [1] * 4, "logprob": [-1.0] * 4, "full_logprob": [-1.0] * 4}
        same |= {"first_by_prefill": False, "tokens": [1] * 4}
        run.append_divergence(
            [{"example": f"e{index}", "index": index, "kl": line, **same} for index, line in enumerate(each)]
        )
    return run.hash


def shown(folder, width=100, **options):
    out = io.StringIO()
    print_screen(read_runs(folder), Console(file=out, width=width, markup=False), **options)
    return out.getvalue()


def test_bytes_held_are_shown_where_slots_do_not_tell_them(tmp_path):
    full = record(tmp_path, "full")
    for method, held in (("snapkv", 2000), ("d2o", 2000), ("attention_matching", 2048)):
        assert " held" not in shown(tmp_path)
        record(tmp_path, method, 0.5, baseline=full, held={"slots": 50.0, "kv_bytes": held})
    (line,) = [line for line in shown(tmp_path).splitlines() if "attention_matching" in line]
    assert " 2 KiB " in line


@pytest.fixture
def sweep(tmp_path):
    full = record(tmp_path, "full")
    for method, worse, kl in (("keyformer", 1.0, 0.01), ("h2o", 0.9, 0.4), ("a2sf", 0.8, EPSILON_KL / 1.1)):
        for ratio in (0.3, 0.7):
            record(tmp_path, method, ratio, score=40 * worse, kl=kl, baseline=full)
    return tmp_path


def test_a_sweep_is_a_table_of_one_line_per_run_and_six_lines_around_it(sweep):
    above, _, below = shown(sweep, took="4 min").partition("All columns: ")
    lines = [line for line in [*above.splitlines(), below] if line.strip()]
    assert max(len(line.rstrip()) for line in lines[:-1]) <= 100 and "--explain" in below
    runs = [line for line in lines if any(line[5:].split()[:1] == [m] or f" {m} " in line[:20] for m in METHODS)]
    heads = [line for line in lines if line.startswith("cache ") or line.lstrip().startswith("KL to")]
    assert len(runs) == 7 and len(heads) == 2 and len(lines) - len(runs) - len(heads) <= AROUND
    assert lines[0].startswith(
        "tiny / xsum, 24 examples · at most 8 new tokens, which cut all answers · 7 runs in 4 min"
    )
    order = [line.split("%")[-1].split()[0] if "%" in line[:6] else line.split()[0] for line in runs]
    assert runs[0].startswith("100 %") and "(41.92)" in runs[0]
    assert [name in line for name, line in zip(("full", *NEAREST * 2), runs, strict=True)] == [True] * 7, order
    assert "equivalent" in runs[1] and "undecided" in runs[2] and "worse" in runs[3] and "fail" in runs[3]
    assert " 70 %" in runs[1] and " 30 %" in runs[4] and "-40 %" in shown(sweep, 140)


METHODS = ("full", "keyformer", "a2sf", "h2o")
NEAREST = ("keyformer", "a2sf", "h2o")


def test_report_and_tables_have_the_screens_order(sweep):
    """Larger budgets first, of one budget by KL, though h2o scores better than a2sf here."""
    wanted = [("full", 1.0), *((name, ratio) for ratio in (0.7, 0.3) for name in NEAREST)]
    assert [(run["method"], run["kv_ratio"]) for run in index(read(sweep))][1:] == wanted[1:]
    for name in ("runs", "divergence"):
        _, (block, *_), _ = blocks_of(read_runs(sweep), name)
        ratios = [row["kv_ratio"] for row in block.rows if row["method"] != "full"]
        assert ratios == [ratio for _, ratio in wanted[1:]], name


def test_the_title_says_where_all_answers_were_cut(tmp_path):
    record(tmp_path, "full", ended="stop")
    assert " · at most 8 new tokens · " in shown(tmp_path)
    record(tmp_path / "cut", "full")
    assert " · at most 8 new tokens, which cut all answers · " in shown(tmp_path / "cut")


def test_an_engines_full_caches_have_no_kl_and_nothing_asks_to_measure_it(tmp_path):
    full = record(tmp_path, "full")
    record(tmp_path, "h2o", 0.5, kl=0.3, baseline=full)
    base = record(tmp_path, "full", setting="engine=openvino", engine={"name": "openvino"})
    eight = {"name": "openvino", "cache": "u8"}
    record(tmp_path, "full", setting="engine=openvino engine.cache=u8", engine=eight)
    record(tmp_path, "openvino", 0.5, baseline=base, setting="engine=openvino", engine={"name": "openvino"})
    lines = [
        line.split(" full ")[1] for line in shown(tmp_path, 200).splitlines() if " full " in line and " 100 " in line
    ]
    found = {setting.strip(): rest.split()[0] for setting, _, rest in (line.strip().partition("  ") for line in lines)}
    assert found == {"-": "0", "engine=openvino": "-", "engine=openvino engine.cache=u8": "-"}
    for path in tmp_path.glob("*/divergence.jsonl"):
        path.unlink()
    assert "was not measured: divergence=true" not in shown(tmp_path, 200)


def test_a_wider_console_gets_more_columns_and_a_narrow_one_all_of_its_own(sweep):
    narrow, wide = shown(sweep, 60), shown(sweep, 240)
    for head in ("R-2", "worse %", "perplexity"):
        assert head in wide and head not in shown(sweep)
    for cell in ("99 %?", "KV peak", "vs 0.05", "10 KiB", "equivalent"):
        assert cell in narrow
    assert max(map(len, narrow.partition("undecided:")[0].splitlines())) <= 60


@pytest.mark.parametrize(
    ("full", "run", "present", "missing"),
    [
        (
            {"n": 4},
            {"n": 4, "score": 20.0, "kl": 0.3},
            ("4 examples: a first look, no verdicts, 20 needed (limit=20)", "0.323", "21.50"),
            ("99 %?", "vs 0.05", "95 %", "too few"),
        ),
        (
            {},
            {"evicts": False},
            ("h2o 0.5: void: no example evicted", "KL to the full cache was not measured: divergence=true"),
            ("TTFT",),
        ),
        ({"timed": True}, {"kl": 0.3, "timed": True}, ("TTFT", "100 ms", "10 ms"), ("Speed was not measured",)),
        (
            {"timed": True, "load": 1.0},
            {"kl": 0.3, "timed": True, "load": 1.0},
            ("full, h2o 0.5: busy machine: times are not comparable",),
            ("TTFT", "100 ms", "10 ms", "Speed was not measured"),
        ),
        (
            {},
            {"kl": 0.01, "heavy": 40.0},
            ("KL rests on one or two examples, its upper end says little: h2o 0.5 (61 % by e0).",),
            (),
        ),
        ({}, {"kl": 0.01, "heavy": 5.0}, ("equivalent",), ("KL rests",)),
    ],
    ids=["few examples", "void", "timed", "busy", "one example", "no one example"],
)
def test_what_the_lines_around_a_table_say(tmp_path, full, run, present, missing):
    record(tmp_path, "h2o", 0.5, baseline=record(tmp_path, "full", **full), **run)
    text = shown(tmp_path)
    assert all(words in text for words in present) and not any(words in text for words in missing), text
    assert (
        max(len(line.rstrip()) for line in text.partition("All columns")[0].splitlines() if line[:4] != "h2o ") <= 100
    )


def test_an_unfinished_run_stays_on_the_screen(tmp_path):
    unfinished = record(tmp_path, "tova", 0.5, score=30.0, baseline=record(tmp_path, "full"))
    (tmp_path / unfinished / "done.json").unlink()
    assert "tova 0.5: partial" in shown(tmp_path)


def test_the_command_prints_the_screen_and_more_on_request(sweep, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main([str(sweep)]) == 0
    assert capsys.readouterr().out == shown(sweep)
    assert main([str(sweep), "--explain"]) == 0
    assert "KL to full: mean KL divergence" in capsys.readouterr().out
    assert main([str(sweep), "--full"]) == 0
    full = capsys.readouterr().out
    assert "99.9 %" in full and "KL divergence from the full cache along" in full and "Bonferroni" not in full
    assert main([str(sweep), "--full", "--explain"]) == 0
    assert "Bonferroni" in capsys.readouterr().out
    assert main([str(sweep), "--view", "runs", "--full"]) == 2
    assert "leave out --view" in capsys.readouterr().err


def test_a_single_run_shows_both_answers_cut_short(tmp_path):
    full = record(tmp_path, "full", n=1)
    record(tmp_path, "h2o", 0.5, n=1, baseline=full)
    out = io.StringIO()
    print_answers(read_runs(tmp_path), Console(file=out, width=100, markup=False))
    first, head, answers, *rest = out.getvalue().splitlines()
    assert first == "answers to example e0:" and "full cache" in head and "h2o, 50 % of the cache" in head
    assert "full says it" in answers and "h2o says it" in answers
    assert len([line for line in rest if line.strip()]) < 10 and "…" in rest[-2] + rest[-3]


# --- progress


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0

    monkeypatch.setattr("kvexp.util.progress.time.monotonic", lambda: Clock.now)
    monkeypatch.setattr("kvexp.util.progress.sys.stdout.isatty", lambda: False, raising=False)
    return Clock


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("seconds", [(1.0, 0.2, 0.1), (0.1, 2.0, 1.5), (5.0, 0.5, 0.3)], ids=str)
def test_the_time_left_is_right_within_a_factor_of_two_once_it_is_said(clock, capsys, groups, seconds):
    """seconds: of a prompt, of an answer's step and of a text's step, for 16 prompts, 3 runs and 10 steps."""
    prompts, steps, runs = 16 // groups, 10, 3
    end = groups * (prompts * seconds[0] + steps * (seconds[1] + seconds[2]))
    work = {PROMPTS: 16, ANSWERS: 16 * runs, TEXTS: 16 * (runs - 1)}
    wrong = []
    with Progress("runs", 16 * (2 * runs - 1), 0, work=work) as progress:

        def passed(kind, count, took):
            clock.now += took
            worked(kind, count)
            left = progress.seconds_left()
            if left is not None and 0.1 * end < clock.now < 0.95 * end:
                wrong.append(max(left / (end - clock.now), (end - clock.now) / max(left, 1e-9)))

        for _ in range(groups):
            for _ in range(prompts):
                passed(PROMPTS, 1, seconds[0])
            for kind, each, took in ((ANSWERS, runs, seconds[1]), (TEXTS, runs - 1, seconds[2])):
                for _ in range(steps):
                    passed(kind, prompts * each / steps, took)
                progress.advance(prompts * each, kind)
    assert wrong and max(wrong) <= 2
    assert capsys.readouterr().out.startswith("runs: 16 prompts, 48 answers, 32 KL passes\n")


RECORDED = json.loads((Path(__file__).parents[1] / "fixtures" / "progress.json").read_text())


@pytest.mark.parametrize("waited", [0.0, 100.0])
def test_the_time_left_of_a_recorded_sweep(clock, waited):
    """A sweep of 18 runs and the full cache; also where the first answer and the first text waited so many seconds."""
    last, said, waits = 0.0, [], {ANSWERS: waited, TEXTS: waited}
    start = clock.now
    with Progress("runs", 760, 0, work=RECORDED["work"]) as progress:
        for now, kind, count in RECORDED["pieces"]:
            clock.now += now - last + waits.pop(kind, 0.0)
            last = now
            worked(kind, count)
            said.append((clock.now - start, progress.seconds_left(), bool(waits) and waited > 0))
    end = said[-1][0]
    known = [(now, left) for now, left, _ in said if left is not None]
    assert known[0][0] > 0.04 * end, "before, nothing is known"
    tenth = 0.1 * (end - 2 * waited)
    late = [(left, end - now) for now, left, waits_still in said if tenth < now < end - tenth and not waits_still]
    assert late and all(left is not None and 0.5 <= left / rest <= 2 for left, rest in late)


def test_a_kind_of_which_nothing_is_to_do_may_be_worked_on(clock, capsys):
    """Conversations force texts while they answer, and no text is one of their pieces of work."""
    with Progress("turns", 4, 0, work={PROMPTS: 2, ANSWERS: 4, TEXTS: 0}) as progress:
        for kind, count in ((PROMPTS, 2), (TEXTS, 0.25), (ANSWERS, 1), (TEXTS, 0.75), (ANSWERS, 1)):
            clock.now += 70
            worked(kind, count)
        progress.advance(2, ANSWERS)
        assert progress.seconds_left() == pytest.approx(280), "half of the answers took four times 70 s"
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "turns: 2 prompts, 4 answers" and said[-1].startswith("turns: 2/2 prompts, 2/4 answers")


def test_piped_progress_is_a_line_a_minute_at_most(clock, capsys):
    with Progress("run", 100, 0) as progress:
        for _ in range(100):
            clock.now += 5.0
            progress.advance()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run: 100 examples" and len(lines) == 9
    assert lines[1] == "run: 12/100 examples, about 7 min left"


def test_a_bar_says_the_time_left_first_for_a_narrow_terminal_cuts_the_end(clock, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with Progress("run", 100, 0) as progress:
        for _ in range(20):
            clock.now += 5.0
            progress.advance()
        assert progress.bar.tasks[0].fields["words"] == "about 7 min left, 20/100 examples"


def test_work_that_tells_of_no_steps_is_counted_by_what_is_written(clock):
    with Progress("run", 4, 0, work={PROMPTS: 4, ANSWERS: 4, TEXTS: 0}) as progress:
        assert progress.seconds_left() is None
        clock.now += 3.0
        progress.advance(kind=ANSWERS)
        assert progress.seconds_left() == pytest.approx(9.0)
