"""kvexp is Hugging Face where nothing is evicted: same tokens, same logits, for every family and way of decoding."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from packaging.version import Version
from test_conf import composed
from tiny import CONFIGS, Hashable, prompts_of, stock, tiny
from transformers import GenerationConfig

from kvexp.core import Budget, CacheConfig
from kvexp.generate import (
    GenerationParams,
    continuation_logprobs,
    decode,
    generate,
    pad_left,
    prefill_together,
    receipts,
)
from kvexp.generate.inputs import MODEL_PROCESSORS, NOT_OFFERED, pad_id
from kvexp.hf import EvictionCache, load_model, load_tokenizer, patch_model
from kvexp.methods import H2O, Full
from kvexp.run.answers import sampling_seed
from kvexp.run.batches import evaluate_run
from kvexp.run.model_spec import load
from kvexp.run.settings import batch_budget, settings_of
from kvexp.util.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
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


OPTIONS = [  # of a family's configuration; before 5.4, transformers honoured GPT-2's in its eager attention alone
    *(("gpt2", {name: True}) for name in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn")),
    ("gpt2", {"scale_attn_weights": False}),
    ("gpt2", {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("opt", {"do_layer_norm_before": False}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen3", {"attention_bias": True}),
]


@pytest.mark.parametrize(("family", "options"), OPTIONS)
def test_options_of_a_family_are_followed(family, options):
    ids, mask = prompts(True)
    model = tiny(family, **options)
    ours, theirs = run(model, ids, mask, EvictionCache(model, Full())), run(stock(family, **options), ids, mask, None)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), atol=1e-4, rtol=0)


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
    model = tiny("mpt", attn_config=Hashable(alibi_bias_max=16))
    eight, sixteen = (
        run(m, ids, mask, EvictionCache(m, Full()), max_new_tokens=2).logits[0] for m in (tiny("mpt"), model)
    )
    assert (eight - sixteen).abs().max() > 1e-3
    by_hand = stock("mpt", attn_config=Hashable(alibi_bias_max=16))
    table = by_hand.transformer.build_mpt_alibi_tensor
    by_hand.transformer.build_mpt_alibi_tensor = lambda heads, width, device=None: table(heads, width, 16, device)
    try:
        expected = run(by_hand, ids, mask, None, max_new_tokens=2).logits[0]
    finally:
        del by_hand.transformer.build_mpt_alibi_tensor
    torch.testing.assert_close(sixteen, expected, atol=1e-4, rtol=0)


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
        decoding = GenerationParams(14, eos=eos, min_new_tokens=least)
        assert torch.equal(generate(ours, rows, Full(), decoding=decoding).sequences, there)
        assert torch.equal(generate(ours, rows, H2O(), Budget(tokens=200), decoding=decoding).sequences, there)


# Fields of transformers' GenerationConfig of which GenerationParams says all, whatever a model's own file holds:
# how answers are searched for and drawn, and how long they may be.
ASKED = {
    *("max_length", "max_new_tokens", "max_time", "early_stopping", "length_penalty", "num_return_sequences"),
    *("do_sample", "num_beams", "num_beam_groups", "diversity_penalty", "low_memory", "use_mtp", "is_assistant"),
    *("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
}
# Fields that cannot change a token: where caches lie, what is returned, how fast it is.
IDLE = {
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "compile_config"),
    *("disable_compile", "continuous_batching_config", "transformers_version", "num_assistant_tokens"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
    *("num_assistant_tokens_schedule", "assistant_confidence_threshold", "prompt_lookup_num_tokens"),
    *("max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind"),
    *("assistant_ensemble_weight", "speculation_type", "pad_token_id", "bos_token_id", "decoder_start_token_id"),
}
# renormalize_logits only rescales; a NaN, which remove_invalid_values hides, ends a run of kvexp.
FOLLOWED = {"eos_token_id", "stop_strings", "renormalize_logits", "remove_invalid_values"}
PROMPTS = [list(range(3, 26)), list(range(50, 37, -1)), [7, 7, 9, 7, 7, 9, 7, 7, 9, 11, 13, 11, 13, 17]]
END = 9
OWN_SETTINGS = {
    "repetition_penalty": 1.8,
    "encoder_repetition_penalty": 1.7,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 1,
    "bad_words_ids": [[n] for n in range(20, 40)],
    "sequence_bias": [[[13], 4.0], [[13, 14], -9.0]],
    "suppress_tokens": [5, 6, 7, 8, *range(20, 40)],
    "begin_suppress_tokens": list(range(30, 50)),
    "forced_bos_token_id": 12,
    "forced_eos_token_id": END,
    "min_length": 23,
    "min_new_tokens": 5,
    "exponential_decay_length_penalty": (1, 3.0),
    "watermarking_config": {"greenlist_ratio": 0.5, "bias": 4.0},
}


def test_every_generation_setting_of_transformers_is_followed_refused_or_known_to_be_ours():
    there = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert there - ASKED - IDLE - FOLLOWED == {*MODEL_PROCESSORS, *NOT_OFFERED} & there
    assert OWN_SETTINGS.keys() == MODEL_PROCESSORS.keys()


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("name", OWN_SETTINGS)
def test_a_model_s_own_logits_processors_give_the_tokens_of_transformers_row_by_row(name, num_beams):
    if name == "encoder_repetition_penalty" and num_beams > 1 and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("transformers 5.4 itself penalises the first beam alone")
    model, reference = copy.deepcopy(tiny("llama")), copy.deepcopy(stock("llama"))
    prompts = [[5], *PROMPTS] if name == "forced_bos_token_id" else PROMPTS
    ends = [END, 54, 2, 36]  # of which these models write some early
    plain = GenerationConfig(eos_token_id=ends, pad_token_id=0)
    own = GenerationConfig(eos_token_id=ends, pad_token_id=0, **{name: OWN_SETTINGS[name]})
    decoding = GenerationParams(10, num_beams=num_beams)
    model.generation_config = plain
    without = generate(model, prompts, Full(), decoding=decoding).tokens
    model.generation_config = reference.generation_config = own
    made = generate(model, prompts, Full(), decoding=decoding).tokens
    for prompt, tokens in zip(prompts, made, strict=True):
        options = {"num_beams": num_beams, "early_stopping": num_beams > 1, "do_sample": False, "max_new_tokens": 10}
        expected = reference.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
        assert tokens == expected[: len(tokens)] and set(expected[len(tokens) :]) <= {0}
    if name not in ("min_length", "min_new_tokens"):
        assert made != without, "the setting changes nothing here, and the test shows nothing"


def test_a_model_s_own_end_tokens_come_no_earlier_than_its_min_length():
    model = copy.deepcopy(tiny("llama"))
    free = generate(model, PROMPTS, Full(), decoding=GenerationParams(10)).tokens
    model.generation_config = GenerationConfig(eos_token_id=free[0][1], min_length=len(PROMPTS[0]) + 6)
    made = generate(model, PROMPTS, Full(), decoding=GenerationParams(10)).tokens
    assert free[0][1] not in made[0][:6]
    model.generation_config = GenerationConfig(eos_token_id=free[0][1], min_length=len(PROMPTS[0]) + 6)
    asked = generate(model, PROMPTS, Full(), decoding=GenerationParams(10, min_new_tokens=1)).tokens
    assert asked[0] == free[0][:2], "min_new_tokens takes the place of min_length, as in transformers"


@pytest.mark.parametrize("way", ["sampled", "asked after the eviction", "two contexts"])
def test_a_model_s_own_logits_processors_reach_every_way_of_generating(way):
    model = copy.deepcopy(tiny("llama"))
    allowed = [11, 12, 13]
    model.generation_config.suppress_tokens = [token for token in range(61) if token not in allowed]
    decoding = GenerationParams(8, sample=way == "sampled")
    if way == "two contexts":
        configs = [CacheConfig(H2O(), Budget(kv_ratio=0.5)), CacheConfig(Full())]
        contexts = prefill_together(model, PROMPTS, configs, max_new_tokens=8)
        made = [tokens for one in decode(model, contexts, decoding, [0] * 3, None, start=0.0) for tokens in one.tokens]
    else:
        questions = None if way == "sampled" else [[4, 5]] * 3
        made = generate(model, PROMPTS, H2O(), Budget(kv_ratio=0.5), questions=questions, decoding=decoding).tokens
    assert {token for tokens in made for token in tokens} <= set(allowed)


def test_a_penalty_counts_a_question_and_no_padding():
    """The question is text that was written; a pad, whose id a text may hold, is not."""
    model = copy.deepcopy(tiny("llama"))
    model.generation_config = GenerationConfig(repetition_penalty=5.0, pad_token_id=3)
    questions = [[4, 5, 6]] * 3
    made = generate(model, PROMPTS, Full(), questions=questions, decoding=GenerationParams(8)).tokens
    whole = [prompt + question for prompt, question in zip(PROMPTS, questions, strict=True)]
    assert made == generate(model, whole, Full(), decoding=GenerationParams(8)).tokens
    assert made == [generate(model, [one], Full(), decoding=GenerationParams(8)).tokens[0] for one in whole]


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"guidance_scale": 1.5}, "sets guidance_scale=1.5, which kvexp does not offer"),
        ({"token_healing": True}, "sets token_healing=True"),
        ({"repetition_penalty": -1.0}, "cannot be followed: `penalty` has to be a strictly positive float"),
    ],
)
def test_generation_settings_that_cannot_be_followed_are_refused(own, message):
    model = copy.deepcopy(tiny("llama"))
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    with pytest.raises(ConfigError, match=re.escape(message)):
        generate(model, PROMPTS, Full(), decoding=GenerationParams(3))


def test_log_likelihoods_are_of_the_raw_logits():
    model = copy.deepcopy(tiny("llama"))
    before = continuation_logprobs(model, PROMPTS[:1], [[4, 5, 6]], Full())
    model.generation_config.repetition_penalty = 5.0
    assert continuation_logprobs(model, PROMPTS[:1], [[4, 5, 6]], Full()) == before


def test_a_run_follows_its_model_s_own_settings_with_shared_prefills_and_measured_divergence(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "kvexp" / "tasks" / "testbed_models" / "testbed_rope", folder)
    model = load_model(str(folder), device="cpu")
    tokenizer = load_tokenizer(str(folder))
    free = generate(model, [tokenizer("text : food milo rice . ask food milo").input_ids], Full()).tokens[0]
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"suppress_tokens": [*free, 2][:2]}))
    words = [f"outputs_dir={tmp_path / 'out'}", "limit=3", "divergence=true", "model.device=cpu", "kv_ratio=0.5"]
    words += ["model=local", f"model.path={folder}", "task=testbed_summary", "method=h2o", "task.max_new_tokens=9"]
    settings = settings_of(*composed(*words))
    run, full = evaluate_run(settings), evaluate_run(settings.baseline())
    banned = tokenizer.decode(free[:1])
    assert not any(banned in row["output"].split() for one in (run, full) for row in one.rows())


# task.pad_to: budgets of the padded prompt, without a pad in the cache; the same slots as with real pads.


SMALL = ["model=tiny", "task=sample", "limit=2", "task.max_new_tokens=4", "task.nll=false"]


def settings(outputs, *overrides):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = OmegaConf.to_container(compose("config", [*SMALL, f"outputs_dir={outputs}", *overrides]), resolve=True)
    return settings_of({k: v for k, v in config.items() if k not in ("log", "experiment")}, {}, overrides)


@pytest.mark.parametrize("extra", [[], ["method=keyformer", "method.tau_end=1.0"], ["budget.layers=pyramid"]])
def test_the_slots_are_those_of_a_prompt_with_real_pads(tmp_path, extra):
    made = settings(tmp_path, "kv_ratio=0.5", "budget.of=padded", "task.pad_to=420", *extra)
    rows = evaluate_run(made).rows()
    model, tokenizer = load(made.model)
    for row, example in zip(rows, made.task.examples(), strict=True):
        prompt = tokenizer(example.prompt).input_ids
        assert len(prompt) < 420
        how = {"decoding": made.decoding, "tokenizer": tokenizer, "seeds": [sampling_seed(made, example), 0]}
        padded = generate(model, [prompt, [7] * 420], made.cache, **how)  # a neighbour of 420 tokens pads the prompt
        receipt = receipts(padded.cache)[0]
        assert (row["receipt"]["kept_digest"], row["receipt"]["slots"]) == (receipt.kept_digest, receipt.slots)
        assert row["output"] == tokenizer.decode(padded.tokens[0], skip_special_tokens=True)
        if "budget.layers=pyramid" not in extra:
            assert row["receipt"]["slots"] == 420 // 2 - 1  # the token to come has the last slot
        assert row["receipt"]["peak_kv_bytes"] < receipt.peak_kv_bytes, "pads hold no memory"


def test_a_prompt_that_loses_only_pads_loses_nothing(tmp_path):
    rows = evaluate_run(settings(tmp_path, "kv_ratio=0.5", "budget.of=padded", "task.pad_to=2000")).rows()
    assert [row["receipt"]["first_eviction_step"] for row in rows] == [None, None]
    assert all(row["receipt"]["slots"] == row["prompt_tokens"] + row["new_tokens"] - 1 for row in rows)


def test_padding_is_another_run_and_its_baseline_another_baseline(tmp_path):
    plain, padded = (settings(tmp_path, "kv_ratio=0.5", *more) for more in ([], ["budget.of=padded", "task.pad_to=99"]))
    assert plain.identity != padded.identity and batch_budget(plain, [5, 9]) is plain.budget
    assert batch_budget(padded, [5, 99]).tokens == 49 and batch_budget(padded, [200]).tokens == 100
    with pytest.raises(ConfigError, match="prompts padded to 99 and 120 tokens in one batch: set batch_size=1"):
        batch_budget(padded, [5, 120])
    assert batch_budget(padded.baseline(), [5, 120]) is None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["task.pad_to=400"], "budget.of=prompt leaves them out: set budget.of=padded, or task.pad_to=null"),
        (["budget.of=padded", "batch_size=2"], "batch_size must be 1 with budget.of=padded, got 2"),
        (["method=h2o_keyformer_paper", "batch_size=2"], "batch_size must be 1 with method.score_batch=sum_all, got 2"),
        (["task.pad_to=0", "budget.of=padded"], "task.pad_to must be at least 1 or null, got 0"),
        (["task.pad_to=9", "task.max_prompt_tokens=8", "budget.of=padded"], "task.pad_to=9 is above"),
    ],
)
def test_padding_that_would_do_nothing_or_mix_rows_is_refused(tmp_path, overrides, words):
    with pytest.raises(ConfigError, match=words):
        settings(tmp_path, *overrides).task.check_options()


def test_prompts_of_one_width_may_share_a_batch(tmp_path):
    width = ["budget.of=padded", "task.pad_to=420", "task.max_prompt_tokens=420", "kv_ratio=0.5"]
    one, two = (evaluate_run(settings(tmp_path / size, *width, f"batch_size={size}")).rows() for size in "12")
    for a, b in zip(one, two, strict=True):
        assert (a["output"], a["receipt"]["kept_digest"]) == (b["output"], b["receipt"]["kept_digest"])


def test_what_older_runs_recorded_of_the_linear_pyramid(tmp_path):
    """At 0 it did nothing: the same run. Any other value made numbers that nothing makes again."""
    made = settings(tmp_path, "kv_ratio=0.5")
    config = made.command["config"]
    older = [{**config, "budget": {**config["budget"], "pyramid": value}} for value in (0.0, 0.5)]
    assert settings_of(older[0], {}, []).identity == made.identity
    with pytest.raises(ConfigError, match=r"budget\.pyramid is not a setting"):
        settings_of(older[1], {}, [])
