"""Lines of a table of runs with scores that are known, and an exhibit gone through from table to picture."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.lib.exhibits import exhibits, full_name, load


def run(method, scores, kv_ratio=None, setting="", metric="acc", task="t", model="m", **own):
    """A line of `kvexp.results.table` with its scores."""
    named = {f"test-128-{25 * (i % 5)}-{i}": {metric: float(score)} for i, score in enumerate(scores)}
    mean, full = float(np.mean(scores)), method == "full"
    row = {"model": model, "task": task, "method": method, "setting": setting, "kv_ratio": kv_ratio, "n": len(named)}
    row |= {metric: mean, f"{metric}_of_full": mean, f"{metric}_low": mean - 2, f"{metric}_high": mean + 2}
    row |= {"verdict99": "baseline" if full else "fail", "hash": f"{method}{kv_ratio}{setting}{task}{model}"}
    row |= {"baseline": None if full else f"fullNone{task}{model}", "headline": metric, "scores": named}
    return row | {"fell_back": "", "search_share": 0.03, "moved_bytes": 1e6, "kmeans_iterations": 3.0} | own


def frame_of(*rows):
    frame = pd.DataFrame(rows)
    # As runs of one sweep: full attention's setting is the part that is not the method's.
    return frame.assign(setting=frame["setting"].fillna(""))


def changed(monkeypatch, name, **fields):
    """The exhibit of this name with other fields, for one test."""
    name = full_name(name)
    monkeypatch.setitem(exhibits(), name, replace(load(name), **fields))


def whole(module, frame):
    """Table, verdict and picture; the verdict."""
    table = module.table(frame)
    verdict, words = module.holds(table)
    assert verdict in (True, False, None) and any(letter.isdigit() for letter in words)
    figure = Figure()
    module.draw(table, figure)
    figure.savefig(Path("/dev/null"), format="png")
    return verdict
