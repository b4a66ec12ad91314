"""Claims: what a file may say, what an interval decides; one is run, recorded, read back and computed again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats as scipy_stats

from experiments import claims as recorded_claims
from kvexp.results.claims import PAGE, SHOWN, Claim, Recorded, expanded, judged, main
from kvexp.results.claims import page as page_of
from kvexp.util.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {
    **{"paper": "A paper, arXiv:0000.00000", "year": 2025, "source": "Table 1", "sentence": "H2O beats a window."},
    **{"models": ["tiny"], "task": "prompts task.max_new_tokens=3", "budget": "kv_ratio=0.5"},
    **{"method": "h2o", "rival": "window", "metric": "kl", "holds": "ahead", "margin": 0, "examples": 16},
}


def written(folder: Path, **fields: object) -> Path:
    file = folder / "mine.yaml"
    kept = {name: value for name, value in (FIELDS | fields).items() if value is not None}
    file.write_text(yaml.safe_dump(kept), encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"margin": None}, "mine.yaml lacks margin"),
        ({"metrik": "kl"}, "mine.yaml: a claim has no field metrik; did you mean metric?"),
        ({"holds": "better"}, "mine.yaml: holds must be one of ahead, level, alike, got 'better'"),
        ({"rival": "full"}, "mine.yaml: holds must be level: no cache is ahead of the full one in kl, got ahead"),
        ({"task": "news limit=3"}, "task: limit=3 must be KEY=VALUE (limit, model: examples, models)"),
        ({"models": "tiny"}, "mine.yaml: models must be a list, got 'tiny'"),
        ({"budget": "half"}, "mine.yaml: budget: half must be KEY=VALUE"),
        ({"sentence": " "}, "mine.yaml: sentence is empty"),
        *[
            ({"margin": -1}, "margin must be at least 0, got -1"),
            ({"examples": 3}, "examples must be at least 16, got 3"),
        ],
        ({"budget": "kv_ratio=1.5"}, "mine.yaml: h2o: kv_ratio must be in (0, 1], got 1.5"),
        ({"method": "h20"}, "mine.yaml: h20: there is no method=h20; did you mean h2o?"),
        ({"metric": "klx"}, "mine.yaml: h2o: metric must be one of kl, rouge1, rouge2, rougeL, rougeLsum, got klx"),
    ],
)
def test_a_wrong_field_is_an_error_that_names_it(fields, said, tmp_path, capsys):
    assert main([str(written(tmp_path, **fields)), "--outputs", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("holds", "margin", "lead", "verdict"),
    [
        *[("ahead", 0, 0.1, "holds"), ("ahead", 0, 0, "contradicted"), ("ahead", 0.2, 0.1, "contradicted")],
        *[("level", 0.2, -0.1, "holds"), ("level", 0.05, -0.1, "contradicted"), ("level", 0, 0.1, "holds")],
        *[("alike", 0.2, -0.1, "holds"), ("alike", 0.05, 0.1, "contradicted"), ("alike", 0.05, -0.1, "contradicted")],
    ],
)
def test_a_lead_without_spread_is_held_against_the_margin(holds, margin, lead, verdict, tmp_path):
    claim = Claim.read(written(tmp_path, holds=holds, margin=margin))
    pairs = {str(n): (1.0 + n, 1.0 + n + lead) for n in range(16)}  # KL: the rival's is larger where the method leads
    of = judged(claim, "tiny", "12", pairs)
    assert of.verdict == verdict
    assert [of.ahead, of.low, of.high] == pytest.approx([lead] * 3)


def test_an_undecided_claim_says_how_many_examples_would_decide(tmp_path):
    gaps = np.random.default_rng(0).normal(0.05, 0.2, 20)
    of = judged(Claim.read(written(tmp_path)), "tiny", "12", {str(n): (1.0, 1.0 + gap) for n, gap in enumerate(gaps)})
    low, high = scipy_stats.t.interval(0.95, 19, gaps.mean(), gaps.std(ddof=1) / np.sqrt(20))
    assert of.verdict == "undecided" and of.low <= low < 0 < high <= of.high
    z = scipy_stats.norm.ppf(0.975) + scipy_stats.norm.ppf(0.8)
    assert of.needed == np.ceil((z * gaps.std(ddof=1) / gaps.mean()) ** 2)


@pytest.mark.parametrize(
    ("kl", "margin", "verdict"), [(0.01, 0.05, "holds"), (0.3, 0.05, "contradicted"), (0.05, 0.05, "undecided")]
)
def test_against_the_full_cache_the_number_is_the_kl(kl, margin, verdict, tmp_path):
    claim = Claim.read(written(tmp_path, rival="full", holds="level", margin=margin))
    values = kl * np.random.default_rng(1).uniform(0.8, 1.2, 20)
    of = judged(claim, "tiny", "12", {str(n): (value, 0.0) for n, value in enumerate(values)})
    assert of.verdict == verdict and 0 < of.low < of.ahead < of.high
    assert of.ahead == pytest.approx(values.mean())


def test_values_with_commas_are_runs_of_their_own():
    assert list(expanded(["kv_ratio=0.5,0.25", "task.lengths=[1,2]"])) == [
        ["kv_ratio=0.5", "task.lengths=[1,2]"],
        ["kv_ratio=0.25", "task.lengths=[1,2]"],
    ]


def test_a_claim_is_run_recorded_read_back_and_computed_again(tmp_path, capsys):
    lines = [json.dumps({"prompt": f"Number {n} of many: " + "word after word " * (4 + n)}) for n in range(16)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    task = f"prompts task.data_files={tmp_path}/prompts.jsonl task.max_new_tokens=3"
    file = written(tmp_path, task=task, budget="kv_ratio=0.5,0.25")
    outputs = str(tmp_path / "outputs")
    assert main([str(file), "--outputs", outputs, "--record"]) == 0
    said = capsys.readouterr().out
    sums = {"h2o": {}, "window": {}}
    for folder in (tmp_path / "outputs").glob("*/divergence.jsonl"):
        method = json.loads((folder.parent / "config.json").read_text("utf-8"))["config"]["method"]["name"]
        for row in map(json.loads, folder.read_text("utf-8").splitlines()):
            kl = np.maximum(row["kl"][int(row["first_by_prefill"]) :], 0).mean()
            sums[method].setdefault(row["example"], []).append(kl)
    assert all(len(of) == 2 for side in sums.values() for of in side.values())
    lead = np.mean([np.mean(sums["window"][name]) - np.mean(of) for name, of in sums["h2o"].items()])
    assert f" {lead:+.3f} (" in said and "n=16" in said

    claim, kept = Claim.read(file), Recorded(tmp_path)
    _, pairs = kept.of(claim, "tiny")
    assert len(pairs) == 16
    for name, pair in pairs.items():
        assert pair == pytest.approx([np.mean(sums[method][name]) for method in ("h2o", "window")], rel=1e-5)
    assert kept.of(Claim.read(written(tmp_path, task=task)), "tiny") is None, "of another budget"
    written(tmp_path, task=task, budget="kv_ratio=0.5,0.25", limits="None of these decides it.")
    assert main([str(file), "--outputs", "/nowhere", "--page", f"{tmp_path}/made/a.md"]) == 0, "words change no row"

    assert main([str(file), "--outputs", outputs, "--recheck", "3"]) == 0
    kept.rows = {
        key: (of, {name: (a + 1, b) for name, (a, b) in rows.items()}) for key, (of, rows) in kept.rows.items()
    }
    kept.write()
    assert main([str(file), "--outputs", outputs, "--recheck", "3"]) == 1
    assert "OUTSIDE" in capsys.readouterr().out


def test_a_job_that_fails_leaves_a_claim_unmeasured(tmp_path, capsys):
    file = written(tmp_path, task=f"prompts task.data_files={tmp_path}/nothing.jsonl")
    assert main([str(file), "--outputs", str(tmp_path)]) in (1, 2)
    assert "nothing.jsonl" in "".join(capsys.readouterr())


# The claims of this repository.


def test_recorded_rows_are_those_of_the_recordings():
    kept = Recorded(recorded_claims.FOLDER)
    for claim in recorded_claims.claims():
        for model in claim.models:
            rows = kept.of(claim, model)
            assert rows is not None, f"{claim.name}: run python -m experiments.claims"
            if claim.recorded:
                _, pairs = recorded_claims.pairs_of(claim, model)
                assert list(rows[1]) == list(pairs)
                assert np.array(list(rows[1].values())) == pytest.approx(np.array(list(pairs.values())), rel=1e-5)


def test_a_recording_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"recorded must be one of .*two_models.csv.* got docs/nothing.csv"):
        recorded_claims.pairs_of(Claim.read(written(tmp_path, recorded="docs/nothing.csv")), "tiny")


def test_the_page_and_the_board_are_made_of_the_claims(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(Path, "write_text", lambda self, text, **_: texts.update({str(self): text}))
    texts: dict[str, str] = {}
    assert main(["--page"]) == 0
    assert set(texts) == {str(PAGE), str(PAGE.with_suffix(".html"))}
    assert all(Path(name).read_text("utf-8") == text for name, text in texts.items())
    assert texts[str(PAGE)].count("\n| [") == SHOWN
    every = recorded_claims.claims()
    assert len(every) >= 30 and len({claim.paper for claim in every}) >= 14
    assert sum("gemma3_270m" in claim.models for claim in every) >= 10
    assert texts[str(PAGE.with_suffix(".html"))].count("<tr data-methods=") == len(every)


def test_a_board_escapes_what_a_claim_says(tmp_path):
    claim = Claim.read(written(tmp_path, sentence="<script>alert(1)</script>"))
    of = judged(claim, "tiny", "12", {str(n): (0.0, 1.0) for n in range(16)})
    assert "<script>alert" not in page_of([of], tmp_path)[".html"]
