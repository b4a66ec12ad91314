"""The notebooks: nothing of a run is committed, every exhibit is in one, what they say was recorded, and they run."""

from __future__ import annotations

import json
import re

import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient

from experiments import findings, strip
from experiments.lib import record
from experiments.lib.exhibits import PAPERS, ROOT, load, names
from experiments.pages import findings as page

FOLDER = ROOT / "notebooks"
FILES = sorted(FOLDER.glob("*.ipynb"))


def cells(paper):
    return nbformat.read(FOLDER / f"{paper}.ipynb", as_version=4).cells


def test_there_is_one_for_each_paper():
    assert {file.stem for file in FILES} == set(PAPERS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_nothing_of_a_run_is_committed(file):
    notebook = json.loads(file.read_text("utf-8"))
    nbformat.validate(nbformat.from_dict(notebook))
    assert notebook == strip.stripped(notebook), "python -m experiments.strip notebooks/*.ipynb"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(code) > 3 and not any(cell["outputs"] or cell["execution_count"] for cell in code)


def test_outputs_and_counts_are_taken_out(tmp_path, capsys):
    notebook = json.loads(FILES[0].read_text("utf-8"))
    last = notebook["cells"][-1]
    last |= {"execution_count": 7, "outputs": [{"output_type": "stream", "name": "stdout", "text": "x"}]}
    notebook["metadata"]["widgets"] = {}
    copy = tmp_path / "a.ipynb"
    copy.write_text(json.dumps(notebook))
    assert strip.main([str(copy)]) == 1 and strip.main([str(copy)]) == 0
    assert copy.read_text("utf-8") == FILES[0].read_text("utf-8")
    copy.write_text(re.sub(r"Recorded: [^.]*[.]", "Recorded: something else.", copy.read_text("utf-8")))
    assert strip.main([str(copy)]) == 1
    assert copy.read_text("utf-8") == FILES[0].read_text("utf-8")


@pytest.mark.parametrize("paper", PAPERS)
def test_every_exhibit_is_told_and_shown_and_no_more(paper):
    """Thin: a cell calls show() with an exhibit's name; the prose before it ends in the outcome that is on record."""
    own = [name for name in names() if name.startswith(f"{paper}_")]
    _, parameters, setup, *rest = cells(paper)
    assert parameters.metadata.tags == ["parameters"] and "experiments.notebook" in setup.source
    assert [cell.source for cell in rest[1::2]] == [f'show("{name}")' for name in own]
    for cell, name in zip(rest[::2], own, strict=True):
        assert cell.source.startswith("## ") and cell.source.endswith(f"*Recorded: {findings.outcomes(name)}.*"), name
        assert len(cell.source.split()) > 12


def test_a_cell_says_what_is_recorded_at_each_scale(monkeypatch):
    known = {
        "real": {"keyformer_fig7": {"holds": True, "words": "", "divergence": {"holds": None, "words": ""}}},
        "testbed": {"keyformer_fig7": {"holds": False, "words": ""}, "pqcache_table3": {"holds": True, "words": ""}},
    }
    monkeypatch.setattr(findings, "recorded", known.get)
    assert findings.outcomes("keyformer_fig7") == (
        "holds on SmolLM2-135M (by divergence undecided), does not hold on the testbed"
    )
    assert findings.outcomes("pqcache_fig8") == "not run on SmolLM2-135M, not run on the testbed"
    assert findings.outcomes("pqcache_table3") == "holds on the testbed"
    known["testbed"]["keyformer_fig9"] = {"holds": None, "words": f"{record.WAITS}: x"}
    assert findings.outcomes("keyformer_fig9") == record.WAITING


def executed(paper, tmp_path, monkeypatch, exhibits=None):
    """Its own cells at smoke scale, up to so many exhibits, in a kernel whose files stay in the test's folder."""
    for kind in ("RUNTIME", "CONFIG", "DATA"):
        monkeypatch.setenv(f"JUPYTER_{kind}_DIR", str(tmp_path / kind))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(FOLDER / f"{paper}.ipynb", as_version=4)
    parameters = notebook.cells[1]
    parameters.source += f"\nOUTPUTS, SMOKE = {str(tmp_path / 'outputs')!r}, True"
    shows = [place for place, cell in enumerate(notebook.cells) if cell.source.startswith("show(")]
    del notebook.cells[shows[:exhibits][-1] + 1 :]
    NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(FOLDER)}}).execute()
    return notebook.cells


@pytest.mark.parametrize(
    ("paper", "exhibits"), [("a2sf", 1), *(pytest.param(p, None, marks=pytest.mark.slow) for p in PAPERS)]
)
def test_it_runs_and_shows_a_verdict_and_a_figure_of_each_exhibit(paper, exhibits, tmp_path, monkeypatch):
    """Every notebook to its end is slow; the first exhibit of one shows that its cells work."""
    shown = [cell for cell in executed(paper, tmp_path, monkeypatch, exhibits) if cell.source.startswith("show(")]
    for cell in shown:
        words = [out.data["text/markdown"] for out in cell.outputs if "text/markdown" in out.get("data", {})]
        assert len(words) == 1 and re.match(r"\*\*(holds|does not hold|undecided)\*\*: .", words[0]), cell.source
        assert sum("image/png" in out.get("data", {}) for out in cell.outputs) == 1, cell.source
    assert len(shown) == (exhibits or sum(name.startswith(f"{paper}_") for name in names()))
    assert len(list((tmp_path / "outputs" / "smoke" / "exhibits").iterdir())) == len(shown)


# -- findings --------------------------------------------------------------------------------------------------


def test_the_findings_are_current():
    assert findings.JUDGEMENTS.read_text("utf-8") == findings.judgements(), "python -m experiments.findings"


def test_every_judgement_stands_in_the_csv_with_its_sentence():
    lines = pd.read_csv(findings.JUDGEMENTS).fillna("").groupby("exhibit", sort=False)
    assert list(lines.groups) == list(names())
    for name, found in lines:
        entry, told = record.recorded("real").get(name), found.set_index(["scale", "judged_by"])
        place = "GPU" if record.is_speed(name) else "testbed"
        assert told.loc[(place, "metric"), "verdict"] == record.status(record.recorded("testbed").get(name))
        if entry is not None:
            metric = told.loc[("SmolLM2-135M", "metric")]
            assert (metric["verdict"], metric["sentence"]) == (record.status(entry), entry["words"])
            assert (("SmolLM2-135M", "divergence") in told.index) == ("divergence" in entry)


def test_the_number_of_a_claim_is_the_recorded_one(monkeypatch):
    entry = {
        "words": "% of full: h2o at 0.9 91.5 (78.3 … 110.5)",
        "divergence": {"words": "KL: keyformer at 0.7 0.041"},
    }
    monkeypatch.setattr(page, "words", lambda name: {"number": "{keyformer at 0.7}; H2O {h2o at 0.9}"})
    assert page.number("keyformer_fig7", entry) == "0.041; H2O 91.5 (78.3..110.5)"
    monkeypatch.undo()
    for name in (name for name in names() if "short" in findings.words(name)):
        told = re.findall(r"\{(.+?)\}", findings.words(name)["number"])
        assert told and all(page.said(record.recorded("real")[name], before) for before in told), name


def test_every_exhibit_has_its_reason_and_no_other_has():
    told = [line.partition(":")[0] for line in findings.WORDS.read_text("utf-8").splitlines() if re.match(r"\w", line)]
    assert sorted(told) == sorted(names()) and all(findings.words(name)["why"] for name in names())
    assert all(load(name).title in findings.judgements() for name in names())


def test_reasons_hold_no_numbers_that_were_measured():
    """An interval or a signed number in the hand-written file would go stale."""
    assert not re.search(r"\d … |[+-]\d+\.\d|\d\.\d+ \(", findings.WORDS.read_text("utf-8"))


def test_findings_of_other_numbers_are_not_current(tmp_path, monkeypatch, capsys):
    known = json.loads(record.MEASURED.read_text("utf-8"))
    known["testbed"]["keyformer_fig7"] |= {"holds": True, "words": "otherwise"}
    del known["testbed"]["a2sf_fig5"]
    monkeypatch.setattr(record, "MEASURED", tmp_path / "measured.json")
    record.MEASURED.write_text(json.dumps(known))
    assert findings.main(["--check"]) == 1
    written = findings.judgements()
    assert "testbed,metric,holds,,otherwise," in written and "make reproduce-a2sf_fig5 SCALE=testbed" in written
    monkeypatch.setattr(findings, "JUDGEMENTS", tmp_path / "findings.csv")
    assert findings.main([]) == 0 and findings.main(["--check"]) == 0


def test_examples_of_several_tasks_are_told_by_task(monkeypatch, tmp_path):
    ids = {"a 1": ("a", 24), "b 1": ("b", 12), "c 1": ("c", 24)}
    known = {"rows": {key: {"task": task, "ids": ["x"] * count} for key, (task, count) in ids.items()}}
    monkeypatch.setattr(record, "MEASURED_REAL", tmp_path / "real.json")
    record.MEASURED_REAL.write_text(json.dumps(known))
    assert record.examples_of({"n": 24, "rows": ["a 1"]}) == "24" and record.examples_of({}) == "-"
    assert record.examples_of({"n": 12, "rows": ["a 1", "b 1"]}) == "24 a, 12 b"
    assert record.examples_of({"n": 24, "rows": ["a 1", "c 1"]}) == "24 of each of 2 tasks"
