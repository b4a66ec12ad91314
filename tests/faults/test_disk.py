"""Disks that fill up and folders that take nothing: one clear line, no row lost, and the same command goes on."""

import os
import shutil
import subprocess
import tempfile

import pytest

from faults.sweeps import lines_of, rows_of, sweep

NO_MODEL = "import kvexp.hf\nkvexp.hf.load_model = lambda *a, **k: print('A MODEL LOADS', flush=True)\n"


@pytest.fixture
def mounted(tmp_path):
    """mounted(options) -> a small file system in memory, unmounted afterwards; skips where it cannot be made."""
    made = []

    def mount(options):
        place = tmp_path / f"disk{len(made)}"
        place.mkdir()
        line = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(line, capture_output=True).returncode:
            pytest.skip("mounting a small file system needs root")
        made.append(place)
        return place

    yield mount
    for place in made:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture(scope="module")
def truth(stage, tmp_path_factory):
    """The rows of an undisturbed sweep."""
    place = tmp_path_factory.mktemp("truth")
    code, said = stage.run(sweep(place / "out"), place / "log")
    assert code == 0, said
    return rows_of(place / "out")


@pytest.mark.parametrize("kind", ["disk", "file size"])
def test_a_full_disk(stage, tmp_path, truth, request, kind):
    """A file system that fills up, which needs root; the kernel's limit on a file, which any user can meet."""
    if kind == "disk":
        disk = request.getfixturevalue("mounted")("size=1m")
        out, launcher, before, words = disk / "out", "shared_prefill", _fills_up(disk), "No space left on device; free"
    else:
        out, launcher, before, words = tmp_path / "out", "basic", LIMITED, "raise the limit on the size of files (ulim"
    code, said = stage.run(sweep(out, launcher=launcher), tmp_path / "log", before)
    assert code == 1 and words in said and "Traceback" not in said
    assert 1 <= len(lines_of(out)) < 9, "some rows were written and some were not"
    rows = [(method, row) for method, found in rows_of(out).items() for row in found.values()]
    assert all(truth[method][row["example"]] == row for method, row in rows)
    if kind == "disk":
        (disk / "more").unlink()
    code, said = stage.run(sweep(out, launcher=launcher), tmp_path / "log2")
    assert code == 0, said
    assert rows_of(out) == truth and len(lines_of(out)) == 9, "no row is lost, none is made twice"


def _fills_up(disk):
    """Somebody else takes all that is left of the disk, after the first row."""
    return f"""
import os
from kvexp.run.store import Run
append = Run.append
def counting(self, *rows):
    append(self, *rows)
    counting.made += 1
    if counting.made == 1:
        with open({str(disk / "more")!r}, "wb", buffering=0) as file:
            try:
                while file.write(bytes(1024)):
                    pass
            except OSError:
                pass
counting.made = 0
Run.append = counting
"""


# The kernel's own limit, in force only while rows are written: else it would cut the output of the test as well.
LIMITED = """
import resource
from kvexp.run.store import Run
append = Run.append
def limited(self, *rows):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))
    try:
        append(self, *rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
Run.append = limited
"""


@pytest.mark.parametrize("place", ["all", "a run"])
def test_read_only_outputs_are_said_before_a_model_loads(stage, tmp_path, mounted, place):
    disk = mounted("size=1m")
    out = disk / "out"
    if place == "a run":  # which exists and lacks its rows
        code, said = stage.run(sweep(out, "limit=1"), tmp_path / "log0")
        assert code == 0, said
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    code, said = stage.run(sweep(out), tmp_path / "log", NO_MODEL)
    assert code == 1 and "Read-only file system; make it writable or choose another outputs_dir" in said
    assert "A MODEL LOADS" not in said and "Traceback" not in said


@pytest.mark.parametrize(("mode", "inside"), [("single", True), ("sweep", False)])
def test_folders_of_somebody_else_are_said_before_a_model_loads(stage, tmp_path, mode, inside):
    """On a file system that others may write to; inside: the folder may be looked into."""
    drop = "import os\nif os.geteuid() == 0:\n    os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    # What is imported later may lie where others may not read.
    drop = "import kvexp.run.batches, kvexp.tasks.metrics\nkvexp.tasks.metrics.scorer()\n" + drop
    words = sweep("OUT")
    words = words if mode == "sweep" else ["method=h2o", *(w for w in words[2:] if "launcher" not in w)]
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        out = os.path.join(folder, "out")
        os.mkdir(out)
        os.chmod(out, 0o555 if inside else 0o000)
        words = [word.replace("OUT", out) for word in words]
        code, said = stage.run(words, tmp_path / "log", NO_MODEL + drop)
        os.chmod(out, 0o755)
    assert code == 1 and "Permission denied; make it writable or choose another outputs_dir" in said
    assert "A MODEL LOADS" not in said and "Traceback" not in said
