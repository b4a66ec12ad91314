"""From divergence.jsonl to verdicts: by hand, Holm's correction by the book, and false verdicts in simulation."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest

from kvexp.results.blocks import interval
from kvexp.results.divergence import (
    NO_END,
    PerExample,
    answer_changes,
    choice_changes,
    choice_kl,
    compared,
    compared_means,
    decide,
    divergence_table,
    frame_of,
    holm_corrected,
    rests_on,
    share_interval,
)
from kvexp.results.read import folders, read_runs
from kvexp.results.views import main as results
from kvexp.run.batches import settings_at
from kvexp.run.model_spec import tokenizer_of
from kvexp.run.store import DIVERGENCE, Run, runs
from kvexp.util.errors import ConfigError


def main(words):
    """`kvexp results --view divergence`."""
    return results([*words, "--view", "divergence"])


def line(index, kl, text="own", first=True, **more):
    n = len(kl)
    found = {"example": f"e{index}", "index": index, "text": text, "first_by_prefill": first, "tokens": list(range(n))}
    found |= {"kl": kl, "full_logprob": [-1.0] * n, "logprob": [-1.5] * n, "same_top1": [1] * n}
    return found | more


def made(outputs, method, lines, kv_ratio=0.5):
    labels = {"model": "tiny", "task": "xsum", "method": method, "kv_ratio": kv_ratio}
    base = Run.open(outputs, {"method": "full"}, labels | {"method": "full"})
    run = Run.open(outputs, labels, labels, baseline=base.hash)
    run.append_divergence(lines)
    return run


def test_prompts_clearly_worse_are_those_whose_mean_is_beyond_a_tenth(tmp_path):
    """Means of 0.2 and 0.11 are, 0.09 is not, whatever single tokens say; the first token does not count."""
    run = made(tmp_path, "h2o", [line(0, [9, 0.1, 0.3]), line(1, [9, 0.22, 0.0]), line(2, [9, 0.18, 0.0])])
    assert divergence_table(read_runs(tmp_path).ran)["worse"].tolist() == [pytest.approx(2 / 3)]
    run.ask(run.labels, {"config": {"worse_kl": 0.15}})
    assert divergence_table(read_runs(tmp_path).ran)["worse"].tolist() == [pytest.approx(1 / 3)]


def test_numbers_by_hand(tmp_path):
    """The first token, which the prefill predicts, is left out; means are over tokens, not over examples."""
    lines = [line(0, [0.5, 0.1, 0.3]), line(1, [0.7, 0.2], same_top1=[1, 0], logprob=[-1.0, -1.0])]
    made(tmp_path, "h2o", lines)
    made(tmp_path, "after_a_question", [line(0, [0.5, 0.1], first=False)])
    row, after = divergence_table(folders(tmp_path)).sort_values("n", ascending=False).to_dict("records")
    assert after["kl"] == pytest.approx(0.3) and math.isnan(after["first_kl"]), "there the first token counts"
    assert (row["n"], row["tokens"]) == (2, 3)
    assert row["kl"] == pytest.approx(0.6 / 3) and row["first_kl"] == pytest.approx(0.6)
    assert row["kl_max"] == 0.3 and row["kl_p50"] == 0.2
    assert row["top1"] == pytest.approx(2 / 3)
    assert row["dlogprob"] == pytest.approx((-0.5 - 0.5 + 0) / 3)
    assert row["dlogprob_rms"] == pytest.approx(math.sqrt(0.5 / 3))
    assert row["ppl_ratio"] == pytest.approx(math.exp(1 / 3))
    assert math.isnan(row["kl_low"]) and row["verdict_kl"] == "undecided", "two examples decide nothing"


@pytest.mark.parametrize(
    ("sums", "found", "share"),
    [
        ([9.0] + [1.0] * 9, [0], 0.5),
        ([1.0] * 19 + [40.0], [19], 40 / 59),
        ([1.0] * 10 + [10.0] + [1.0] * 8 + [12.0], [19, 10], 22 / 40),
        ([10.0, 12.0] + [1.0] * 17, [], math.nan),  # two count among twenty
        ([0.0] * 30, [], math.nan),
        ([5.0, 1.0], [], math.nan),
    ],
)
def test_a_mean_rests_on_one_or_two_examples_that_make_up_half_of_it(sums, found, share):
    few, made = rests_on(np.array(sums))
    assert few == found and made == pytest.approx(share, nan_ok=True)


def test_answers_of_one_token_have_nothing_to_tell(tmp_path):
    made(tmp_path, "h2o", [line(0, [0.5])])
    assert divergence_table(folders(tmp_path)).empty


def test_verdicts_and_comparison(tmp_path):
    rng = np.random.default_rng(0)
    for method, level in (("near", 0.01), ("middle", 0.05), ("far", 0.3)):
        made(tmp_path, method, [line(i, [0.0, *(level * rng.gamma(4, 0.25, 8))]) for i in range(40)])
    frame = divergence_table(folders(tmp_path)).set_index("method")
    assert frame.loc["near", "verdict_kl"] == "equivalent" and frame.loc["far", "verdict_kl"] == "worse"
    assert frame.loc["middle", "verdict_kl"] == "undecided"
    assert (frame["kl_low"] < frame["kl"]).all() and (frame["kl"] < frame["kl_high"]).all()
    pairs = compared({each.run.hash: each for each in folders(tmp_path) if each.run.baseline}, "own")
    assert len(pairs) == 3 and (pairs["holm"] < 0.05).all()
    by_hash = {row["hash"]: name for name, row in frame.iterrows()}
    wins = pairs["better"].map(by_hash).value_counts()
    assert wins.to_dict() == {"near": 2, "middle": 1}


def test_runs_of_other_numbers_of_examples_are_said(tmp_path, capsys):
    """A run that lacks examples, as it failed on them, has a verdict over the others: both tables say so."""
    for method, count in (("near", 40), ("far", 30)):
        made(tmp_path, method, [line(i, [0.0, 0.01, 0.02]) for i in range(count)])
    assert main([str(tmp_path)]) == 0 and "n differs between runs of one table: KL" in capsys.readouterr().out
    assert results([str(tmp_path)]) == 0 and "n differs between runs of one table: KL" in capsys.readouterr().out
    made(tmp_path, "far", [line(i, [0.0, 0.01, 0.02]) for i in range(30, 40)])
    assert main([str(tmp_path)]) == 0 and "n differs" not in capsys.readouterr().out


def test_only_runs_that_share_labels_are_compared(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for method, level in (("near", 0.01), ("far", 0.3)):
        for ratio in (0.2, 0.5):
            lines = [line(i, [0.0, *(level * rng.gamma(4, 0.25, 8))]) for i in range(40)]
            made(tmp_path, method, lines, kv_ratio=ratio)
    runs = {each.run.hash: each for each in folders(tmp_path) if each.run.baseline}
    everything, pairs = compared(runs, "own"), compared(runs, "own", ["kv_ratio"])
    assert (len(everything), len(pairs)) == (6, 2)
    assert (pairs["holm"] <= 2 * pairs["p"] + 1e-12).all(), "corrected for the two that are compared"
    assert main([str(tmp_path), "--alike", "kv_ratio"]) == 0
    below = capsys.readouterr().out.split("p (Holm)")[1]
    assert sum("near" in line and "far" in line for line in below.splitlines()) == 2
    assert main([str(tmp_path), "--alike", "ratio"]) == 2
    assert "no run has a label ratio; their labels are" in capsys.readouterr().err


def test_holm_by_the_book():
    """p = .01, .04, .03, .005 of four: .005*4, .01*3, .03*2, and .04*1, which may not fall below .06 (Holm 1979)."""
    corrected = holm_corrected(np.array([0.01, 0.04, 0.03, 0.005, math.nan]))
    assert corrected.tolist() == pytest.approx([0.03, 0.06, 0.06, 0.02, math.nan], nan_ok=True)
    rng, levels = np.random.default_rng(3), {"a": 1, "b": 2, "c": 2}
    found = {name: {f"e{i}": level * rng.gamma(4, 0.25) for i in range(40)} for name, level in levels.items()}
    pairs = compared_means(found).set_index(["one", "other"])
    assert pairs["better"].tolist() == ["a", "a", ""] and (pairs["holm"] >= pairs["p"]).all()


def test_a_file_that_was_edited_or_cut_off(tmp_path):
    run = made(tmp_path, "h2o", [line(0, [0.0, 0.1]), line(1, [0.0, 0.2])])
    file = run.path / DIVERGENCE
    broken = line(2, [0.0, 0.3]) | {"kl": [0.0]}
    file.write_text(file.read_text() + json.dumps(broken) + "\n" + '{"example": "e3", "te')
    with pytest.raises(ConfigError, match=r"divergence.jsonl:3: kl must be a list as long as tokens.*; correct"):
        run.divergence()
    file.write_text("\n".join([*file.read_text().splitlines()[:2], '{"example": "e3", "te']))
    assert sorted(name for name, _ in run.divergence()) == ["e0", "e1"]
    run.append_divergence([line(3, [0.0, 0.4])])
    assert ("e3", "own") in run.divergence()


@pytest.mark.slow
@pytest.mark.parametrize("n", [20, 50])
def test_false_verdicts_on_skewed_clustered_divergences(n):
    """Answers of 8 to 64 tokens, log-normal within and between answers; the truth is epsilon itself, so any verdict is
    false: each of the two happens at most as often as 2.5 % and the error of the simulation allow."""
    rng, rounds, equivalent, worse = np.random.default_rng([3, n]), 600, 0, 0
    truth = math.exp(1.0**2 / 2 + 1.0**2 / 2)
    for _ in range(rounds):
        tokens = rng.integers(8, 65, n).astype(float)
        level = rng.lognormal(0, 1.0, n)
        sums = np.array([m * rng.lognormal(0, 1.0, int(t)).sum() for m, t in zip(level, tokens, strict=True)])
        found = decide(share_interval(sums, tokens, 0.95), truth)
        equivalent, worse = equivalent + (found == "equivalent"), worse + (found == "worse")
    slack = 2 * math.sqrt(0.025 * 0.975 / rounds)
    assert worse / rounds <= 0.025 + slack
    assert equivalent / rounds <= 0.025 + slack, equivalent / rounds


# --- the command


@pytest.fixture(scope="module")
def sweep(stage, tmp_path_factory):
    outputs = tmp_path_factory.mktemp("kl") / "outputs"
    words = ["-m", "model=tiny", "task=sample", "limit=2", "task.max_new_tokens=6", "task.nll=false"]
    words += ["kv_ratio=0.3", "method=h2o,keyformer,pqcache", "divergence=false", f"outputs_dir={outputs}"]
    code, said = stage.run(words, outputs.parent / "log")
    assert code == 0, said
    return outputs


def test_the_command_measures_once_and_changes_no_row(sweep, capsys):
    before = {file: file.read_bytes() for file in sweep.glob("*/examples.jsonl")}
    assert main([str(sweep), "--measure", "--text", "both"]) == 0
    shown = capsys.readouterr().out
    assert "its own greedy answer" in shown and "the reference answer" in shown and "too few" in shown
    lines = {file: file.read_bytes() for file in sweep.glob("*/divergence.jsonl")}
    assert len(lines) == 3 and all(len(content.splitlines()) == 4 for content in lines.values())
    assert main([str(sweep), "--measure", "--text", "both"]) == 0
    assert "made already" in capsys.readouterr().out
    assert lines == {file: file.read_bytes() for file in sweep.glob("*/divergence.jsonl")}
    assert before == {file: file.read_bytes() for file in sweep.glob("*/examples.jsonl")}


def test_what_it_forces_is_the_row_of_the_full_cache(sweep):
    """The own text, decoded, is the output of full's row: made in another forward, from another file."""
    main([str(sweep), "--measure"])
    base = next(run for run in runs(sweep) if run.labels["method"] == "full")
    outputs = {row["example"]: row["output"] for row in base.rows()}
    tokenizer = tokenizer_of(settings_at(base).model)
    for run in runs(sweep):
        for (example, text), line in run.divergence().items():
            if text == "own":
                assert tokenizer.decode(line["tokens"], skip_special_tokens=True) == outputs[example]


def test_nothing_to_measure_says_why(stage, tmp_path, capsys):
    words = ("model=tiny", "task=sample", "limit=1", "task.max_new_tokens=4", "task.nll=false")
    words += ("method=h2o", "generation=sampling")
    code, said = stage.run([*words, f"outputs_dir={tmp_path / 'out'}"], tmp_path / "log")
    assert code == 0, said
    assert main([str(tmp_path / "out"), "--measure"]) == 1
    assert "sampled answers differ by chance" in capsys.readouterr().out
    assert main([str(tmp_path / "out"), "--epsilon", "0"]) == 2
    assert main([str(tmp_path / "none")]) == 2


def test_by_position_leaves_out_the_prefills_token():
    lines = [line(0, [0.0, 0.1, 0.3], same_top1=[1, 1, 0]), line(1, [0.0, 0.3])]
    frame = PerExample.of(lines).by_position()
    assert frame["position"].tolist() == [2, 3] and frame["n"].tolist() == [2, 1]
    assert frame["kl"].tolist() == pytest.approx([0.2, 0.3]) and frame["top1"].tolist() == [1.0, 0.0]
    assert PerExample.of([line(0, [0.5, 0.1], first=False)]).by_position()["position"].tolist() == [1, 2]


def test_verdicts_go_by_what_a_run_was_asked_for_with(tmp_path):
    labels = {"model": "tiny", "task": "xsum", "method": "h2o", "kv_ratio": 0.5}
    base = Run.open(tmp_path, {"method": "full"}, labels | {"method": "full"})
    asked = {"config": {"epsilon_kl": 0.2, "epsilon_top1": 0.3}}
    run = Run.open(tmp_path, labels, labels, baseline=base.hash, command=asked)
    run.append_divergence([line(i, [0.0, 0.1, 0.1 + i / 1000]) for i in range(30)])
    (row,) = divergence_table(folders(tmp_path)).to_dict("records")
    assert (row["epsilon"], row["epsilon_top1"], row["verdict_kl"]) == (0.2, 0.3, "equivalent")
    (row,) = divergence_table(folders(tmp_path), 0.05).to_dict("records")
    assert (row["epsilon"], row["epsilon_top1"], row["verdict_kl"]) == (0.05, 0.3, "worse")


def test_ends_that_say_nothing_are_not_printed_as_numbers():
    ends = interval("95 %", "low", "high", 4, most=NO_END).cell
    assert ends({"low": 0.005, "high": 2.3e7}) == "0.0050..>100"
    assert ends({"low": 0.005, "high": 0.1}) == "0.0050..0.1000"
    assert ends({"low": math.nan, "high": math.nan}) == "too few"


def test_a_picture_of_each_kind_and_why_there_is_none(tmp_path, capsys):
    for method, level in (("near", 0.01), ("far", 0.3)):
        for ratio in (0.3, 0.6):
            made(tmp_path, method, [line(i, [0.0, level, level * (1 + i / 40)]) for i in range(30)], kv_ratio=ratio)
    for axis in ("kv_ratio", "position"):
        assert main([str(tmp_path), "--plot", str(tmp_path / f"{axis}.svg"), "--x", axis]) == 0
    drawn = (tmp_path / "kv_ratio.svg").read_text()
    assert all(f"<!-- {text} -->" in drawn for text in ("near", "far", "equivalent below 0.05"))
    assert main([str(tmp_path), "--plot", str(tmp_path / "b.png"), "--x", "bytes"]) == 2, "no rows, so no bytes"
    assert main([str(tmp_path), "--plot", str(tmp_path / "b.png"), "--text", "reference"]) == 2
    assert "--view divergence --measure" in capsys.readouterr().err


def test_results_print_the_metric(tmp_path, capsys):
    made(tmp_path, "h2o", [line(i, [0.0, 0.1, 0.2]) for i in range(24)])
    assert main([str(tmp_path), "--metric", "kl", "--csv", str(tmp_path / "kl.csv")]) == 0
    assert "KL divergence from the full cache" in capsys.readouterr().out
    assert pd.read_csv(tmp_path / "kl.csv")["kl"].tolist() == pytest.approx([0.15])
    assert main([str(tmp_path), "--metric", "top1", "--markdown", str(tmp_path / "x.md")]) == 0
    assert "| h2o | 0.5 | 0.1500 |" in (tmp_path / "x.md").read_text()
    assert main([str(tmp_path), "--metric", "f1"]) == 2 and results([str(tmp_path), "--compare"]) == 2
    assert main([str(tmp_path), "--where", "method=full"]) == 1


# What became of the full cache's answers, from rows made by hand.


LABELS = {"model": "tiny", "task": "xsum", "kv_ratio": 0.5}


def pair(outputs, full, other, method="h2o"):
    """Folders of a baseline and a run with these rows, which lack an id alone."""
    base = Run.open(outputs, {"method": "full"}, LABELS | {"method": "full", "kv_ratio": None})
    run = Run.open(outputs, {"method": method}, LABELS | {"method": method}, baseline=base.hash)
    for each, rows in ((base, full), (run, other)):
        for index, row in enumerate(rows):
            each.append({"example": f"e{index}", "index": index, "metrics": {"acc": 0.0}, "skipped": None} | row)
    found = {folder.run.hash: folder for folder in folders(outputs)}
    return found[run.hash], found[base.hash]


def test_answers(tmp_path):
    """An answer that ends earlier parts at the first place that only the other one has."""
    full = [[1, 2, 3, 4], [5, 6], [7], [], [1, 2, 3], [1, 2]]
    other = [[1, 2, 9, 4], [5, 6], [8, 7], None, [1, 2], [1, 2, 3]]
    rows = ([{"output_tokens": tokens} for tokens in each] for each in (full, other))
    found = answer_changes(*pair(tmp_path, *rows))
    shares = (3 / 4 + 1 + 0 + 2 / 3 + 2 / 3) / 5
    assert found == pytest.approx({"same_answers": 1 / 5, "same_tokens": shares, "parts_at": 3.0})


def test_rows_of_before_hold_no_tokens(tmp_path):
    run, base = pair(tmp_path, [{}], [{"output_tokens": [1]}])
    assert all(math.isnan(value) for value in answer_changes(run, base).values())
    assert all(math.isnan(value) for value in answer_changes(run, None).values())
    assert frame_of(read_runs(tmp_path)).empty


def test_choices_flip_both_ways(tmp_path):
    def row(acc, *logprobs):
        return {"metrics": {"acc": acc}, "choices": {"logprobs": list(logprobs), "tokens": [1] * len(logprobs)}}

    full = [row(100.0, -1, -2), row(0.0, -3, -1), row(100.0, -1, -5), row(0.0, -2, -1)]
    other = [row(0.0, -2, -1), row(100.0, -1, -3), row(0.0, -5, -1), row(0.0, -2, -1)]
    found = choice_changes(*pair(tmp_path, full, other))
    assert (found["n"], found["metric"], found["lost"], found["won"]) == (4, "acc", 2, 1)
    assert found["choice_kl"] == pytest.approx(sum(map(by_hand, full, other)) / 4)
    assert math.isnan(found["kl_low"]), "four examples give no interval"


def by_hand(full, other):
    """KL over two choices, from the definition."""
    p, q = (1 / (1 + math.exp(b - a)) for a, b in (full["choices"]["logprobs"], other["choices"]["logprobs"]))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def test_scores_that_are_no_right_or_wrong_do_not_flip(tmp_path):
    full = [{"metrics": {"f1": 30.0}, "choices": {"logprobs": [-1.0, -2.0]}}]
    found = choice_changes(*pair(tmp_path, full, [{**full[0], "metrics": {"f1": 20.0}}]))
    assert found["lost"] is None and found["choice_kl"] == 0.0


def test_other_choices_have_no_divergence():
    assert choice_kl({"logprobs": [-1.0]}, {"logprobs": [-1.0]}) is None
    assert choice_kl({"logprobs": [-1.0, -2.0]}, {"logprobs": [-1.0, -2.0, -3.0]}) is None
