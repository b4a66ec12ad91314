"""Rows that were cut or damaged on disk, and clocks that jump: no result that is whole is lost."""

from __future__ import annotations

import pytest
import torch

from faults.sweeps import METHODS, folder_of, lines_of, rows_of, sweep
from kvexp.core import Budget
from kvexp.generate import GenerationParams, continuation_logprobs, generate
from kvexp.hf import random_model
from kvexp.hf.load import first_not_finite
from kvexp.methods import H2O, Full, Window
from kvexp.run.store import runs
from kvexp.util import NotFinite

WORDS = ("batch_size=2", "generation=sampling")


@pytest.fixture(scope="module")
def truth(stage, tmp_path_factory):
    place = tmp_path_factory.mktemp("truth")
    code, said = stage.run(sweep(place / "out", *WORDS), place / "log")
    assert code == 0, said
    return rows_of(place / "out")


def test_a_truncated_line_and_a_damaged_one(stage, tmp_path, truth):
    out = tmp_path / "out"
    assert stage.run(sweep(out, *WORDS, launcher="shared_prefill"), tmp_path / "log")[0] == 0
    assert rows_of(out) == truth
    files = {method: folder_of(out, method) / "examples.jsonl" for method in METHODS}
    whole = {method: file.read_bytes() for method, file in files.items()}
    files["full"].write_bytes(whole["full"][:-100])  # its last line has no end
    lines = whole["h2o"].splitlines(keepends=True)
    files["h2o"].write_bytes(lines[0] + lines[1][:40] + b"\xff\x00" + lines[1][42:] + lines[2])

    code, said = stage.run(sweep(out, *WORDS, launcher="shared_prefill"), tmp_path / "log2")
    assert code == 1 and "Traceback" not in said and f"{files['h2o']}:2: " in said, said
    files["h2o"].write_bytes(lines[0] + lines[2])
    code, said = stage.run(sweep(out, *WORDS, launcher="shared_prefill"), tmp_path / "log3")
    assert code == 0, said
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


def test_a_clock_that_jumps(stage, tmp_path, truth):
    out = tmp_path / "out"
    code, said = stage.run(sweep(out, *WORDS, "timeout_s=60"), tmp_path / "log", BACKWARDS)
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


@pytest.mark.parametrize(("value", "launcher"), [("float('nan')", "shared_prefill"), ("float('inf')", "basic")])
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
