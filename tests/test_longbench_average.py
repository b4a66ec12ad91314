"""The average over LongBench's data sets: by hand, complete or not, and from real run folders."""

import math

import pandas as pd
import pytest

from kvexp.record import Run
from kvexp.results import table
from kvexp.results.longbench_table import FOURTEEN, averages, main

# PQCache's table 3 (arXiv:2407.12820), Full, whose printed average is that of its column
LLAMA2 = [18.78, 22.11, 36.77, 27.83, 31.51, 8.31, 26.91, 20.68, 26.23, 64.00, 83.26, 41.53, 2.92, 8.00]


def frame(*runs):
    """(method, kv_ratio, {data set: score}) -> rows as kvexp.results.table makes them."""
    rows = [
        {
            **{"model": "m", "task": f"longbench/{name}", "method": method, "kv_ratio": ratio, "setting": ""},
            **{"numerics": 1, "status": "done", "score": score, "hash": f"{method}{ratio}{name}"},
            "baseline": None if method == "full" else f"full{math.nan}{name}",
        }
        for method, ratio, scores in runs
        for name, score in scores.items()
    ]
    return pd.DataFrame(rows)


def test_the_average_of_the_paper():
    full = dict(zip(FOURTEEN, LLAMA2, strict=True))
    found = averages(frame(("full", math.nan, full), ("h2o", 0.2, {name: score / 2 for name, score in full.items()})))
    assert found["method"].tolist() == ["full", "h2o"]
    assert round(found["average"][0], 2) == 29.92
    assert found["of_full"].tolist() == pytest.approx([100, 50])
    assert found.loc[0, list(FOURTEEN)].tolist() == LLAMA2 and found["missing"].tolist() == ["", ""]


def test_each_data_set_may_have_a_file_of_its_own():
    """Without an archive at hand: the names of the files do not part what belongs together, two files of one do."""
    own = frame(("full", math.nan, {"trec": 60.0, "qmsum": 20.0}))
    own["setting"] = ["seed=1 task.data_files=trec.jsonl", "seed=1 task.data_files=qmsum.jsonl"]
    found = averages(own, names=("trec", "qmsum"))
    assert found["average"].tolist() == [40.0] and found["setting"].tolist() == ["seed=1"]
    again = own.iloc[[0]].assign(score=10.0, hash="again", setting="seed=1 task.data_files=other.jsonl")
    parted = averages(pd.concat([own, again]), names=("trec", "qmsum"))
    assert parted["average"].isna().all() and len(parted) == 3
    other = own.iloc[[0]].assign(score=10.0, hash="other", setting="seed=2 task.data_files=trec.jsonl")
    assert averages(pd.concat([own, other]), names=("trec", "qmsum"))["average"].tolist()[0] == 40.0


def test_one_missing_means_no_average():
    full = dict(zip(FOURTEEN, LLAMA2, strict=True))
    less = {name: score for name, score in full.items() if name not in ("trec", "qmsum")}
    found = averages(frame(("full", math.nan, full), ("h2o", 0.2, less | {"lcc": 50.0}), ("h2o", 0.5, full)))
    assert found["missing"].tolist() == ["", "qmsum, trec", ""]
    assert math.isnan(found["average"][1]) and math.isnan(found["of_full"][1])
    assert found["lcc"].tolist()[1] == 50.0 and found["kv_ratio"].tolist()[1:] == [0.2, 0.5]
    small = averages(frame(("full", math.nan, {"trec": 60.0, "qmsum": 20.0})), names=("trec", "qmsum"))
    assert small["average"].tolist() == [40.0]


def test_unfinished_runs_and_other_tasks_do_not_count():
    whole = frame(("full", math.nan, {"trec": 60.0, "qmsum": 20.0}))
    whole.loc[0, "status"] = "partial"
    whole.loc[1, "task"] = "xsum"
    assert averages(whole, names=("trec",)).empty
    assert averages(pd.DataFrame()).empty


def test_from_run_folders(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    hashes = {}
    for method, scores in (("full", {"trec": 50.0, "qasper": 30.0}), ("h2o", {"trec": 25.0, "qasper": 15.0})):
        for name, score in scores.items():
            labels = {"model": "m", "task": f"longbench/{name}", "method": method, "kv_ratio": None, "setting": ""}
            record = Run.open(tmp_path, {"m": method, "n": name}, labels, {}, baseline=hashes.get(name))
            record.append({"example": "a", "metrics": {"score": score}, "receipt": {"first_eviction_step": 0}})
            record.append({"example": "b", "metrics": {"score": 0.0}, "receipt": {"first_eviction_step": 0}})
            record.finish(2)
            hashes.setdefault(name, record.hash)
    found = averages(table(tmp_path), names=("qasper", "trec"))
    assert found["average"].tolist() == [20.0, 10.0] and found["of_full"].tolist() == [100.0, 50.0]
    assert main([str(tmp_path), "--csv", str(tmp_path / "out.csv")]) == 0
    assert "no average yet, missing: narrativeqa" in capsys.readouterr().out
    assert len(pd.read_csv(tmp_path / "out.csv")) == 2
    assert main([str(tmp_path / "gone")]) == 2
