"""With nothing evicted, kvexp is Hugging Face: same tokens, same logits, for every family and way of decoding."""

import pytest
import torch
from tiny import CONFIGS, prompts_of, stock, tiny

from kvexp.core import Budget
from kvexp.generate import GenerationParams, generate, pad_left
from kvexp.generate.inputs import pad_id
from kvexp.methods import H2O, Full
from kvexp.models import EvictionCache

NEW, WIDTH = 13, 19
WAYS = {
    "greedy": {},
    "left_padded": {},
    "beam4": {"num_beams": 4},
    "sampling": {"do_sample": True},
}


def prompts(padded):
    ids = torch.randint(3, 61, (3, WIDTH), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :7] = mask[2, :1] = 0
    return (ids, mask) if padded else (ids[:1], mask[:1])


def run(model, ids, mask, cache, **way):
    torch.manual_seed(11)  # plain generate() samples from the global generator
    return model.generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        use_cache=True,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **{"do_sample": False, "max_new_tokens": NEW, **way},
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("family", "window"), [*((family, None) for family in CONFIGS), ("mistral", 11)])
def test_full_equals_stock(family, window, way):
    changes = {"sliding_window": window} if window else {}
    ids, mask = prompts(way != "greedy")
    model = tiny(family, **changes)
    cache = EvictionCache(model, Full(), num_beams=WAYS[way].get("num_beams", 1))
    theirs = run(stock(family, **changes), ids, mask, None, **WAYS[way])
    ours = run(model, ids, mask, cache, **WAYS[way])
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    for a, b in zip(ours.logits, theirs.logits, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
    assert cache.get_seq_length() == WIDTH + NEW - 1


@pytest.mark.parametrize("family", CONFIGS)
def test_a_budget_for_everything_equals_stock_and_a_small_one_does_not(family):
    ids, mask = prompts(False)
    model = tiny(family)
    theirs = run(stock(family), ids, mask, None)
    ample = run(model, ids, mask, EvictionCache(model, H2O(), Budget(tokens=WIDTH + NEW)))
    scarce = run(model, ids, mask, EvictionCache(model, H2O(), Budget(tokens=4)))
    assert ample.sequences.tolist() == theirs.sequences.tolist()
    torch.testing.assert_close(torch.stack(ample.logits), torch.stack(theirs.logits), atol=1e-4, rtol=0)
    # The first token comes from the full prompt whatever the budget; after it the small budget must show.
    torch.testing.assert_close(scarce.logits[0], theirs.logits[0], atol=1e-4, rtol=0)
    assert not torch.allclose(scarce.logits[1], theirs.logits[1], atol=1e-2)


@pytest.mark.parametrize("family", CONFIGS)
def test_installed_model_without_our_cache_is_still_the_model(family):
    ids, mask = prompts(True)
    model, plain = tiny(family), stock(family)
    positions = {} if family == "mpt" else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    with torch.inference_mode():
        ours, theirs = (m(ids, attention_mask=mask, use_cache=False, **positions).logits for m in (model, plain))
    torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()], atol=1e-4, rtol=0)
    assert run(model, ids, mask, None).sequences.tolist() == run(plain, ids, mask, None).sequences.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", CONFIGS)
def test_half_precision_stays_close_to_stock(family, dtype):
    """One prompt's logits: half precision rounds at 2**-8 (bfloat16), and SDPA sums in another order than eager."""
    import copy

    from kvexp.models import patch_model

    ids, mask = prompts(True)
    plain = copy.deepcopy(stock(family)).to(dtype)
    ours = patch_model(copy.deepcopy(plain))
    options = {"max_new_tokens": 2, "min_new_tokens": 2}
    a = run(ours, ids, mask, EvictionCache(ours, Full()), **options).logits
    b = run(plain, ids, mask, None, **options).logits
    scale = b[0].float().std()
    assert torch.isfinite(a[0].float()).all()
    assert (a[0].float() - b[0].float()).abs().max() < 0.1 * scale


def test_mpt_uses_the_slopes_of_its_checkpoint():
    """transformers builds ALiBi for alibi_bias_max 8 always; a checkpoint that says 16 has steeper slopes."""
    ids, mask = prompts(False)
    model = tiny("mpt", attn_config=_Attn16())
    eight, sixteen = (
        run(m, ids, mask, EvictionCache(m, Full()), max_new_tokens=2).logits[0] for m in (tiny("mpt"), model)
    )
    assert (eight - sixteen).abs().max() > 1e-3
    by_hand = stock("mpt", attn_config=_Attn16())
    table = by_hand.transformer.build_mpt_alibi_tensor
    by_hand.transformer.build_mpt_alibi_tensor = lambda heads, width, device=None: table(heads, width, 16, device)
    try:
        expected = run(by_hand, ids, mask, None, max_new_tokens=2).logits[0]
    finally:
        del by_hand.transformer.build_mpt_alibi_tensor
    torch.testing.assert_close(sixteen, expected, atol=1e-4, rtol=0)


class _Attn16(dict):
    """A hashable MPT attention configuration, for the cache of tiny models."""

    def __init__(self):
        super().__init__(alibi_bias_max=16)

    def __hash__(self):
        return 16


@pytest.mark.parametrize("family", CONFIGS)
def test_the_own_loop_writes_what_stock_generate_writes(family):
    """Rows of unequal length, an end token that some of them meet, a least length: token for token, padding too."""
    stocked, ours = stock(family), tiny(family)
    rows = prompts_of(7, (19, 30, 26))
    free = generate(ours, rows, Full(), decoding=GenerationParams(14, eos=None))
    end = free.tokens[1][5]
    ids, mask = pad_left(rows, pad_id(ours, None), "cpu")
    options = {"attention_mask": mask, "do_sample": False, "pad_token_id": pad_id(ours, None), "max_new_tokens": 14}
    for eos, least in ((None, 0), (end, 0), (end, 9)):
        there = stocked.generate(ids, **options, eos_token_id=eos, min_new_tokens=least or None)
        here = generate(ours, rows, Full(), decoding=GenerationParams(14, eos=eos, min_new_tokens=least))
        assert torch.equal(here.sequences, there)
        evicting = generate(
            ours, rows, H2O(), Budget(tokens=200), decoding=GenerationParams(14, eos=eos, min_new_tokens=least)
        )
        assert torch.equal(evicting.sequences, there)
