"""Rows that were cut or spoilt on disk, and clocks that jump: what is lost is told, put aside and made again."""

import json

import pytest

from faults.sweeps import METHODS, folder_of, launchers, lines_of, rows_of, sweep
from kvexp.run.store import runs

WORDS = ("batch_size=2", "generation=sampling")


@pytest.fixture(scope="module")
def truth(stage, tmp_path_factory):
    place = tmp_path_factory.mktemp("truth")
    code, said = stage.run(sweep(place / "out", *WORDS), place / "log")
    assert code == 0, said
    return rows_of(place / "out")


@pytest.mark.parametrize("launcher", launchers("shared_prefill"))
def test_a_truncated_line_and_a_corrupt_one(stage, tmp_path, truth, launcher):
    out = tmp_path / "out"
    assert stage.run(sweep(out, *WORDS, launcher=launcher), tmp_path / "log")[0] == 0
    assert rows_of(out) == truth
    files = {method: folder_of(out, method) / "examples.jsonl" for method in METHODS}
    whole = {method: file.read_bytes() for method, file in files.items()}
    files["full"].write_bytes(whole["full"][:-100])  # its last line has no end
    lines = whole["h2o"].splitlines(keepends=True)
    spoilt = lines[1][:40] + b"\xff\x00" + lines[1][42:]
    files["h2o"].write_bytes(lines[0] + spoilt + lines[2])

    code, said = stage.run(sweep(out, *WORDS, launcher=launcher), tmp_path / "log2")
    assert code == 0 and "Traceback" not in said, said
    assert f"{files['h2o']}:2: not a row (" in said and "moved to quarantine.jsonl" in said
    (moved,) = (folder_of(out, "h2o") / "quarantine.jsonl").read_text().splitlines()
    told = json.loads(moved)
    assert (told["file"], told["line"]) == ("examples.jsonl", 2)
    assert told["text"].encode("utf-8", "surrogateescape") == spoilt.rstrip(b"\n")
    assert rows_of(out) == truth, "what was lost was made again, and is the same"
    assert files["keyformer"].read_bytes() == whole["keyformer"]
    assert len(lines_of(out)) == 9


# The wall clock goes back a day with every look at it, in the processes' own eyes and for the names of files.
BACKWARDS = """
import time, datetime
real, past = time.time, [0]
def jumping(*_):
    past[0] += 86400
    return real() - past[0]
time.time = jumping
time.time_ns = lambda: int(jumping() * 1e9)
class Jumping(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(jumping(), tz)
datetime.datetime = Jumping
"""


@pytest.mark.parametrize("launcher", launchers("basic"))
def test_a_clock_that_jumps(stage, tmp_path, truth, launcher):
    out = tmp_path / "out"
    code, said = stage.run(sweep(out, *WORDS, "timeout_s=60", launcher=launcher), tmp_path / "log", BACKWARDS)
    assert code == 0, said
    assert rows_of(out) == truth
    assert {run.hash for run in runs(out)} == {run.path.name for run in runs(out)} and len(list(runs(out))) == 3
    seconds = [value for run in runs(out) for row in run.rows() for value in row["seconds"].values()]
    assert all(value is None if launcher == "shared_prefill" else 0 < value < 60 for value in seconds)
