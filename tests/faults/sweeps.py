"""The sweep these tests hurt, and what they read of what it leaves."""

import json

from kvexp.run.store import runs

METHODS = ("full", "h2o", "keyformer")


def sweep(out, *words, launcher="basic"):
    """Three runs of three examples; words take the place of settings that are given here."""
    base = ["method=h2o,keyformer", "kv_ratio=0.3", "model=testbed_rope", "task=testbed_summary", "limit=3"]
    base += ["batch_size=1", "task.max_new_tokens=6", f"hydra/launcher={launcher}", f"outputs_dir={out}"]
    given = {word.partition("=")[0] for word in words}
    return ["-m", *(word for word in base if word.partition("=")[0] not in given), *words]


def rows_of(out, *without):
    """Method -> its rows by example, but for times and these columns."""
    return {
        run.labels["method"]: {
            row["example"]: {key: value for key, value in row.items() if key not in ("seconds", *without)}
            for row in run.rows()
        }
        for run in runs(out)
    }


def lines_of(out):
    """Every line of every examples.jsonl, which all must be whole rows; (method, example) of each."""
    return [
        (run.labels["method"], json.loads(line)["example"])
        for run in runs(out)
        for file in run.path.glob("examples.jsonl")
        for line in file.read_text().splitlines()
    ]


def folder_of(out, method):
    return next(run.path for run in runs(out) if run.labels["method"] == method)
