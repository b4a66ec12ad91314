"""The short decode step against the general path and the slower modes: same tokens, kept sets, scores and logits."""

import pytest
import torch
from tiny import CONFIGS, prompts_of, tiny

import kvexp.core.layer as layer
import kvexp.core.noise as noise
from kvexp.core import Budget
from kvexp.generate import Decoding, generate, receipts
from kvexp.methods import (
    A2SF,
    H2O,
    TOVA,
    DilatedWindow,
    KeyAttention,
    Keyformer,
    KeyformerA2SF,
    StreamingLLM,
    Window,
)
from kvexp.models import EvictionCache

HALF = Budget(kv_ratio=0.5)
METHODS = [
    H2O(),
    KeyAttention(),
    Keyformer(),
    Keyformer(noise="none", tau_end=3.0),
    Keyformer(noise="gaussian", fresh=False),
    Keyformer(key_window="release_frozen"),
    A2SF(alpha=0.3),
    A2SF(alpha=0.0, protect_recent=3),
    KeyformerA2SF(),
    TOVA(),
    Window(),
    DilatedWindow(),
    StreamingLLM(),
    StreamingLLM(n_sinks=0),
]
ROWS = {"padded": (40, 33, 40), "equal": (36, 36)}


def both(family, method, budget, lengths, monkeypatch, plan=None, **changes):
    """(short, general, how often the short step was taken)."""
    model, rows = tiny(family, **changes), prompts_of(3, lengths)
    decoding, seeds = Decoding(14, eos=None), list(range(len(lengths)))
    taken, original = [], layer.step.ready

    def counted(*arguments):
        taken.append(original(*arguments))
        return taken[-1]

    monkeypatch.setattr(layer.step, "ready", counted)
    short = generate(model, rows, method, budget, decoding=decoding, seeds=seeds, keep_logits=True, **(plan or {}))
    monkeypatch.setattr(layer.step, "ready", lambda *_: False)
    general = generate(model, rows, method, budget, decoding=decoding, seeds=seeds, keep_logits=True, **(plan or {}))
    return short, general, sum(taken)


def scores(cache: EvictionCache):
    """Score by layer, row, head and position."""
    found = {}
    for number, state in enumerate(cache.states):
        places, values = state.slots.positions.tolist(), state.slots.score.tolist()
        for b, heads in enumerate(places):
            for h, slots in enumerate(heads):
                found |= {(number, b, h, p): values[b][h][s] for s, p in enumerate(slots) if p >= 0}
    return found


def alike(short, general):
    assert torch.equal(short.sequences, general.sequences)
    torch.testing.assert_close(torch.stack(short.logits), torch.stack(general.logits), atol=1e-4, rtol=0)
    one, other = scores(short.cache), scores(general.cache)
    assert one.keys() == other.keys()
    for place, value in one.items():
        assert value == pytest.approx(other[place], abs=1e-4), place
    for a, b in zip(receipts(short.cache), receipts(general.cache), strict=True):
        assert a == b


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_short_step_is_the_general_one(method, rows, monkeypatch):
    short, general, taken = both("llama", method, HALF, ROWS[rows], monkeypatch)
    assert taken == 13 * 2, "every decode step of both layers goes the short way, or nothing is tested"
    alike(short, general)


@pytest.mark.parametrize("family", CONFIGS)
def test_on_every_family(family, monkeypatch):
    for method in (H2O(), Keyformer()):
        short, general, taken = both(family, method, HALF, ROWS["padded"], monkeypatch)
        assert taken > 0
        alike(short, general)
        monkeypatch.undo()


def test_with_a_sliding_window(monkeypatch):
    short, general, taken = both("mistral", A2SF(alpha=0.5), HALF, ROWS["padded"], monkeypatch, sliding_window=11)
    assert taken > 0
    alike(short, general)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("family", CONFIGS)
def test_renumbered_sinks_on_every_family(family, rows, monkeypatch):
    """RoPE in halves, interleaved and partial, ALiBi; learned positions cannot move and stay original."""
    positions = "original" if family in ("gpt2", "opt") else "renumbered"
    short, general, taken = both(
        family, StreamingLLM(n_sinks=3), HALF, ROWS[rows], monkeypatch, plan={"positions": positions}
    )
    assert taken == 13 * 2
    alike(short, general)


def test_renumbered_sinks_within_a_sliding_window(monkeypatch):
    """Budget 20 is more than the 11 places that a query sees: a sink is hidden once its place is too far."""
    short, general, taken = both("mistral", StreamingLLM(), HALF, ROWS["padded"], monkeypatch, sliding_window=11)
    assert taken > 0
    alike(short, general)


def test_rows_that_have_not_filled_their_budget(monkeypatch):
    """The short rows still grow while the long one overwrites."""
    short, general, taken = both("llama", H2O(), Budget(tokens=30), (40, 22, 18), monkeypatch)
    assert taken > 0
    alike(short, general)


@pytest.mark.parametrize("method", METHODS[:9], ids=repr)
def test_gathering_and_hiding_agree_with_it(method):
    model, rows, decoding = tiny("llama"), prompts_of(3, (40, 33, 40)), Decoding(14, eos=None)
    each = [generate(model, rows, method, HALF, decoding=decoding, mode=m) for m in ("overwrite", "compact", "mask")]
    kept = [[generation.cache.kept(number) for number in range(2)] for generation in each]
    assert kept[0] == kept[1] == kept[2]
    assert each[0].tokens == each[1].tokens == each[2].tokens


def test_noise_is_hashed_anew_when_the_steps_ahead_are_used_up(monkeypatch):
    """Four at a time, so that thirteen steps need it three times; rows of several lengths."""
    monkeypatch.setattr(noise, "AHEAD", 4)
    short, general, taken = both("llama", Keyformer(), HALF, ROWS["padded"], monkeypatch)
    assert taken == 13 * 2
    alike(short, general)
