"""Disks that fill up and folders that take nothing: one clear line, no row lost, and the same command goes on."""

import os
import shutil
import subprocess
import tempfile

import pytest
import torch

from faults.sweeps import folder_of, lines_of, rows_of, sweep
from kvexp.core import Budget
from kvexp.generate import GenerationParams, continuation_logprobs, generate
from kvexp.hf import random_model
from kvexp.hf.load import first_not_finite
from kvexp.methods import H2O, Full, Window
from kvexp.run.store import runs
from kvexp.util.errors import NotFinite

NO_MODEL = "import kvexp.hf\nkvexp.hf.load_model = lambda *a, **k: print('A MODEL LOADS', flush=True)\n"


@pytest.fixture
def disk(tmp_path):
    """A file system of 1 MiB in memory, unmounted afterwards; skips where it cannot be made."""
    place = tmp_path / "disk"
    place.mkdir()
    line = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(line, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def truth(undisturbed):
    return rows_of(undisturbed)


@pytest.mark.parametrize("kind", ["disk", "file size"])
def test_a_full_disk(stage, tmp_path, truth, request, kind):
    """A file system that fills up, which needs root; the kernel's limit on a file, which any user can meet."""
    if kind == "disk":
        disk = request.getfixturevalue("disk")
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


def test_a_folder_of_somebody_else_is_said_before_a_model_loads(stage, tmp_path):
    """On a file system that others may write to, but not in this folder."""
    drop = "import os\nif os.geteuid() == 0:\n    os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    # What is imported later may lie where others may not read.
    drop = "import kvexp.run.batches, kvexp.tasks.metrics\nkvexp.tasks.metrics.scorer()\n" + drop
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        out = os.path.join(folder, "out")
        os.mkdir(out)
        os.chmod(out, 0o000)
        code, said = stage.run(sweep(out), tmp_path / "log", NO_MODEL + drop)
        os.chmod(out, 0o755)
    assert code == 1 and "Permission denied; make it writable or choose another outputs_dir" in said
    assert "A MODEL LOADS" not in said and "Traceback" not in said


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


@pytest.mark.slow  # no run looks at the clock for more than times
def test_a_clock_that_jumps(stage, tmp_path, truth):
    out = tmp_path / "out"
    code, said = stage.run(sweep(out), tmp_path / "log", BACKWARDS, bare=True)
    assert code == 0, said
    assert rows_of(out) == truth
    assert {run.hash for run in runs(out)} == {run.path.name for run in runs(out)} and len(list(runs(out))) == 3
    assert all(0 < value < 60 for run in runs(out) for row in run.rows() for value in row["seconds"].values())


# NaN or inf out of the model: that run stops and names the layer, everything else of the sweep is there.


# Layer 2's MLP overflows, once a cache has been evicted by H2O or at the second example of any.
OVERFLOW = """
import kvexp.hf.load as load
patch = load.patch_model
def patch_model(model, **options):
    model = patch(model, **options)
    seen = {}
    def look(module, args, kwargs):
        caches = getattr(kwargs["past_key_values"], "caches", [kwargs["past_key_values"]])
        seen["bad"] = any(cache.config.method.name == "h2o" and cache.get_seq_length() for cache in caches)
    def break_it(module, args, output):
        return output * VALUE if seen["bad"] else output
    model.register_forward_pre_hook(look, with_kwargs=True)
    model.transformer.h[2].mlp.register_forward_hook(break_it)
    return model
load.patch_model = patch_model
"""


@pytest.mark.parametrize(
    ("value", "launcher"),
    [("float('nan')", "shared_prefill"), pytest.param("float('inf')", "basic", marks=pytest.mark.slow)],
)
def test_that_run_stops_and_the_others_do_not(stage, tmp_path, value, launcher):
    out, before = tmp_path / "out", OVERFLOW.replace("VALUE", value)
    code, said = stage.run(sweep(out, launcher=launcher), tmp_path / "log", before)
    assert code == 1 and "1 run(s) failed" in said and "Traceback" not in said
    assert "the logits of this run hold NaN or inf" in said
    assert "(first in layer 2, module transformer.h.2.mlp; examples test-0)" in " ".join(said.split())
    rows = rows_of(out)
    assert {method: len(found) for method, found in rows.items()} == {"full": 3, "keyformer": 3, "h2o": 0}
    assert "NotFinite" in (folder_of(out, "h2o") / "failure.json").read_text()
    code, said = stage.run(sweep(out, launcher=launcher), tmp_path / "log2")
    assert code == 0, said
    assert len(rows_of(out)["h2o"]) == 3 and rows_of(out)["keyformer"] == rows["keyformer"]


def broken(step):
    """A model whose second layer puts out NaN in its forward number `step`, and only then."""
    sizes = {"hidden_size": 24, "intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = random_model("llama", num_hidden_layers=2, vocab_size=61, **sizes)
    forwards = [0]

    def count(module, args):
        forwards[0] += 1

    def spoil(module, args, output):
        return output * float("nan") if forwards[0] == step else output

    model.register_forward_pre_hook(count)
    model.model.layers[1].mlp.register_forward_hook(spoil)
    return model


PROMPT = [[3, 5, 7, 11, 13, 17, 19, 23]]


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_single_bad_forward_is_noticed(step, beams):
    """Even where what it left in the cache is evicted again before the end."""
    decoding = GenerationParams(max_new_tokens=6, num_beams=beams, eos=None)
    with pytest.raises(NotFinite, match="logits of this run hold NaN or inf"):
        generate(broken(step), PROMPT, Window(), Budget(tokens=2), decoding=decoding)
    generate(broken(99), PROMPT, Window(), Budget(tokens=2), decoding=decoding)


@pytest.mark.parametrize("step", [1, 3])
def test_log_probabilities_too(step):
    with pytest.raises(NotFinite):
        continuation_logprobs(broken(step), PROMPT, [[2, 3, 4, 5]], H2O(), Budget(tokens=4))
    continuation_logprobs(broken(99), PROMPT, [[2, 3, 4, 5]], H2O(), Budget(tokens=4))


def test_the_innermost_module_is_named_and_padding_is_not():
    model = broken(1)
    with first_not_finite(model) as found:
        model(torch.tensor(PROMPT))
    assert found == ["model.layers.1.mlp"]
    with first_not_finite(model) as found:  # its second forward is a sound one, and so are its rows of unequal length
        generate(model, [PROMPT[0], PROMPT[0][:3]], Full(), decoding=GenerationParams(max_new_tokens=3, eos=None))
    assert found == []
