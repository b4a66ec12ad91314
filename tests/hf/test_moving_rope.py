"""RoPE whose frequencies go by the longest row of a forward: each row is what stock `generate` says of it alone."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from test_conf import composed
from tiny import VOCAB, Hashable, prompts_of, stock
from transformers import AutoModelForCausalLM

from kvexp.core import Budget
from kvexp.diagnose.options import check_diagnosable
from kvexp.generate import (
    GenerationParams,
    continuation_logprobs,
    decode_batches,
    divergence_from_full,
    generate,
    prefill,
    prefill_together,
)
from kvexp.generate.loglikelihood import score_tokens
from kvexp.hf import EvictionCache, patch_model
from kvexp.hf.load import load_config
from kvexp.hf.traits import max_positions
from kvexp.methods import H2O, Full, KVzip, StreamingLLM, Window
from kvexp.run.batches import evaluate_run, prefill_groups, run_group
from kvexp.run.lm_eval_model import KvexpLM
from kvexp.run.model_spec import tokenizer_of
from kvexp.run.prompts import Weightless, budget_obstacle, prompt_of
from kvexp.run.session import Session
from kvexp.run.settings import settings_of
from kvexp.util.errors import CacheError, ConfigError

TESTBED = Path(__file__).resolve().parents[2] / "kvexp" / "tasks" / "testbed_models" / "testbed_gqa"
LIMIT = 300  # the texts of the task have up to 128, 256 and 384 tokens


def rope_of(kind, width, limit):
    short = {"short_factor": [1.0] * (width // 2), "long_factor": [4.0] * (width // 2), "attention_factor": 1.0}
    moved = {"original_max_position_embeddings": limit, **short} if kind == "longrope" else {"factor": 4.0}
    return {"rope_type": kind, "rope_theta": 10000.0, **moved}


# -- through Python: a tiny random model with the limit at 12 tokens ---------------------------------------------------

SHORT, LONG = list(range(1, 10)), list(range(2, 25))
GREEDY = GenerationParams(6, eos=None)
KINDS = pytest.mark.parametrize("kind", ["longrope", "dynamic"])
FAMILIES = pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt_neox"])


def tiny_model(kind, family="llama"):
    rope = rope_of(kind, 14, 12)
    if family == "gpt_neox":
        rope |= {"partial_rotary_factor": 1.0}
    return copy.deepcopy(stock(family, rope_parameters=Hashable(rope), max_position_embeddings=12))


def alone(kind, prompt, new=6, family="llama"):
    """Stock `generate` of a model that has seen nothing yet."""
    fresh = tiny_model(kind, family)
    ids = torch.tensor([prompt])
    made = fresh.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None
    )
    return made[0, len(prompt) :].tolist()


def kvexp_model(kind, family="llama"):
    return patch_model(tiny_model(kind, family))


BEYOND = {"beyond_context": True}


@KINDS
@FAMILIES
def test_rows_after_each_other_are_what_stock_says_of_each_alone(kind, family):
    """dynamic keeps the frequencies of the longest forward so far: they are those of a new model before each row."""
    model = kvexp_model(kind, family)
    for prompt in (SHORT, LONG, LONG[:14], list(range(5, 17)), SHORT):  # one ends at the limit, some cross it later
        made = generate(model, [prompt], Full(), decoding=GREEDY, **BEYOND)
        assert made.tokens == [alone(kind, prompt, family=family)]


@KINDS
def test_prompts_of_unequal_length_in_one_batch_are_refused(kind):
    model = kvexp_model(kind)
    for method, budget in ((Full(), None), (H2O(), Budget(tokens=8))):
        for params in (GREEDY, GenerationParams(6, eos=None, num_beams=2)):
            with pytest.raises(ConfigError, match="prompts of 9 to 23 tokens in one batch would change each other"):
                generate(model, [SHORT, LONG], method, budget, decoding=params, **BEYOND)
    with pytest.raises(ConfigError, match=r"longest row of a forward, from 13 tokens on: prompts of 9 to 23"):
        continuation_logprobs(model, [SHORT, LONG], [[1], [2]], Full(), **BEYOND)
    with pytest.raises(ConfigError, match="one by one, or prompts of equal length together"):
        prefill_together(model, [SHORT, LONG], [EvictionCache(model, Full(), **BEYOND).config], max_new_tokens=2)
    with pytest.raises(ConfigError, match="prompts of 9 to 10 tokens"):  # a short row that grows past the limit
        generate(model, [SHORT, [*SHORT, 3]], Full(), decoding=GREEDY, **BEYOND)


@KINDS
def test_rows_of_equal_length_and_rows_below_the_limit_go_together(kind):
    model = kvexp_model(kind)
    rows = [LONG, LONG[::-1]]
    assert generate(model, rows, Full(), decoding=GREEDY, **BEYOND).tokens == [alone(kind, row) for row in rows]
    few = GenerationParams(2, eos=None)
    rows = [SHORT, SHORT[2:]]
    assert generate(model, rows, Full(), decoding=few, **BEYOND).tokens == [alone(kind, row, 2) for row in rows]


@KINDS
def test_hugging_faces_generate_over_rows_of_unequal_length_is_refused(kind):
    model = kvexp_model(kind)
    ids = torch.tensor([[0] * (len(LONG) - len(SHORT)) + SHORT, LONG])
    mask = torch.ones_like(ids)
    mask[0, : len(LONG) - len(SHORT)] = 0
    for cache in (None, EvictionCache(model, Full(), **BEYOND)):
        with pytest.raises(CacheError, match="rows that end at 9 to 23 tokens in one forward would change each other"):
            model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=2)
    with pytest.raises(CacheError, match="rows that end at 9 to 23 tokens in one forward would change each other"):
        model(ids, attention_mask=mask)


@KINDS
def test_beams_are_stocks(kind):
    fresh, ids = tiny_model(kind), torch.tensor([LONG])
    wanted = fresh.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, num_beams=3, do_sample=False, eos_token_id=None
    )[0, len(LONG) :].tolist()
    params = GenerationParams(6, eos=None, num_beams=3)
    assert generate(kvexp_model(kind), [LONG], Full(), decoding=params, **BEYOND).tokens == [wanted]


@KINDS
def test_prompts_in_parts_are_refused(kind):
    model = kvexp_model(kind)
    for beams in (1, 2):
        params = GenerationParams(3, eos=None, prefill_chunk=5, num_beams=beams)
        with pytest.raises(ConfigError, match="chunks of 5 tokens would be turned by others than the prompt of 23"):
            generate(model, [LONG], Full(), decoding=params, **BEYOND)
    assert generate(model, [SHORT], Full(), decoding=GenerationParams(2, eos=None, prefill_chunk=5)).tokens
    with pytest.raises(ConfigError, match="feed prompts whole"):
        generate(model, [LONG], H2O(), Budget(tokens=8), decoding=GREEDY, bounded_chunk=8, **BEYOND)
    cache = EvictionCache(model, Full(), prompt_tokens=len(LONG), **BEYOND)
    with pytest.raises(CacheError, match=r"tokens 1 to 5 were fed in one forward of a longer text"):
        model(torch.tensor([LONG[:5]]), past_key_values=cache)


@KINDS
def test_methods_that_turn_keys_or_read_the_prompt_twice_are_refused(kind):
    model = kvexp_model(kind)
    if kind == "dynamic":
        with pytest.raises(ConfigError, match="method kvzip cannot read the prompt a second time"):
            EvictionCache(model, KVzip(instruct=False), Budget(tokens=8), **BEYOND)
    with pytest.raises(ConfigError, match=f"positions=renumbered cannot work with rope_type '{kind}'"):
        EvictionCache(model, StreamingLLM(), Budget(tokens=8), positions="renumbered", **BEYOND)


def of_rope(limit, **rope):
    parameters = Hashable({"rope_theta": 10000.0, **rope})
    return patch_model(copy.deepcopy(stock("llama", rope_parameters=parameters, max_position_embeddings=limit)))


@pytest.mark.parametrize("side", ["short", "long"])
def test_on_one_side_of_longropes_limit_prompts_are_repeated_and_come_in_chunks(side):
    """Below the limit its factors are those of a plain RoPE here, above it those of a linear one by 4."""
    sides = of_rope(211, **rope_of("longrope", 14, 150 if side == "short" else 20))
    other = {"rope_type": "default"} if side == "short" else {"rope_type": "linear", "factor": 4.0}
    plain, (prompt,) = of_rope(211, **other), prompts_of(5, (57,))
    runs = [(KVzip(instruct=False, chunk=20), {})]
    if side == "short":
        runs += [(H2O(), {"bounded_chunk": 16}), (H2O(), {"chunk": 13})]
    for method, options in runs:
        made = [
            prefill(model, [prompt], method, Budget(tokens=24), max_new_tokens=4, **options) for model in (sides, plain)
        ]
        for layer in range(2):
            assert made[0].cache.kept_positions(layer) == made[1].cache.kept_positions(layer)
        torch.testing.assert_close(made[0].logits, made[1].logits, rtol=1e-4, atol=1e-5)


def test_a_prompt_is_not_repeated_across_longropes_limit():
    model, (prompt,) = of_rope(211, **rope_of("longrope", 14, 70)), prompts_of(5, (57,))
    with pytest.raises(ConfigError, match="feeds up to 28 tokens behind the prompt of 57 to repeat it: lower"):
        prefill(model, [prompt], KVzip(instruct=False, chunk=20), Budget(tokens=24), max_new_tokens=4)


@KINDS
@torch.no_grad()
def test_several_tokens_behind_a_prompt_are_fed_one_by_one(kind):
    model = kvexp_model(kind)
    (each,) = continuation_logprobs(model, [SHORT], [[4, 5, 6, 7, 8]], Full(), **BEYOND)
    context = prefill(model, [SHORT], Full(), max_new_tokens=5, **BEYOND)
    with pytest.raises(ConfigError, match="feed the continuation one token at a time"):
        score_tokens(model, context.fork([0]), [[4, 5, 6, 7, 8]], one_forward=True)
    assert [token.logprob for token in score_tokens(model, context, [[4, 5, 6, 7, 8]])[0]] == pytest.approx(each)
    fresh, cache, found = tiny_model(kind), None, []
    for ids in (SHORT, [4], [5], [6], [7]):
        out = fresh(torch.tensor([ids]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        found.append(out.logits[0, -1].log_softmax(-1))
    wanted = [float(row[token]) for row, token in zip(found, [4, 5, 6, 7, 8], strict=True)]
    assert each == pytest.approx(wanted, abs=1e-4)


@KINDS
def test_contexts_of_one_prompt_decode_together_and_those_of_two_do_not(kind):
    model = kvexp_model(kind)
    configs = [EvictionCache(model, *how, **BEYOND).config for how in ((Full(),), (Window(), Budget(tokens=9)))]
    full, window = prefill_together(model, [LONG], configs, max_new_tokens=6)
    (((found,),),) = (divergence_from_full(model, full.fork([0]), [window.fork([0])], max_new_tokens=6),)
    assert found.tokens == alone(kind, LONG)
    apart = generate(model, [LONG], Window(), Budget(tokens=9), decoding=GREEDY, keep_logits=True, **BEYOND)
    (both,) = decode_batches(model, [[full, window]], GREEDY, [[0]], None, start=0.0)
    assert [one.tokens[0] for one in both] == [alone(kind, LONG), apart.tokens[0]]
    contexts = [prefill(model, [prompt], Full(), **BEYOND) for prompt in (SHORT, LONG)]
    with pytest.raises(CacheError, match="rows that end at 10 to 24 tokens"):
        decode_batches(model, [[context] for context in contexts], GREEDY, [[0], [0]], None, start=0.0)


@KINDS
def test_lm_eval_asks_row_by_row(kind):
    model = kvexp_model(kind)

    class Words:
        eos_token_id, bos_token_id, pad_token_id, name_or_path = 0, 1, 0, "words"

    lm = KvexpLM(model, method="full", tokenizer=Words(), batch_size=4, **{"cache.beyond_context": True})
    assert lm.scorer.batch_size == 1
    asked = [("", SHORT, [4, 5, 6, 7, 8]), ("", LONG, [3]), ("", LONG[:11], [2, 1])]
    together = lm._loglikelihood_tokens(asked)
    for request, found in zip(asked, together, strict=True):
        each = continuation_logprobs(model, [request[1]], [request[2]], Full(), **BEYOND)[0]
        assert found[0] == pytest.approx(sum(each), abs=1e-5)


# -- runs: a trained model ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["longrope", "dynamic"])
def moved(request, tmp_path_factory):
    """The folder of a trained model whose RoPE changes at 300 tokens."""
    folder = tmp_path_factory.mktemp(request.param) / "model"
    shutil.copytree(TESTBED, folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = rope_of(request.param, config["head_dim"], LIMIT)
    if request.param == "dynamic":
        config["max_position_embeddings"] = LIMIT
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def mostly(kind):
    """The model of the other kind is for the slow tests."""
    other = {"longrope": "dynamic", "dynamic": "longrope"}[kind]
    return pytest.mark.parametrize("moved", [kind, pytest.param(other, marks=pytest.mark.slow)], indirect=True)


def settings(folder, outputs, *words):
    words = ("model=local", f"model.path={folder}", f"outputs_dir={outputs}", *words)
    config, choices = composed(*words)
    return settings_of(config, choices, list(words))


@torch.no_grad()
def by_stock(folder, one, new):
    """example -> the answer of a fresh stock model to the row's prompt alone."""
    fresh, made = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"), {}
    tokenizer, examples = tokenizer_of(one.model), list(enumerate(one.task.examples()))
    for _, example in examples:
        prompt = prompt_of(one, Weightless(fresh.config), tokenizer, example)
        ids, model = torch.tensor([prompt.ids]), copy.deepcopy(fresh)
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
        made[prompt.example.id] = tokenizer.decode(answer[0, len(prompt.ids) :], skip_special_tokens=True)
    return made


def answers(record):
    return {row["example"]: row["output"] for row in record.rows()}


TASK = ("task=testbed_needle", "task.lengths=[160,384]", "task.depths=[50]", "limit=6", "task.max_new_tokens=6")


@mostly("longrope")
def test_batches_and_shared_prefills_write_the_row_alone(moved, tmp_path):
    one = settings(moved, tmp_path / "1", *TASK, "method=full", "batch_size=1")
    eight = settings(moved, tmp_path / "8", *TASK, "method=full", "batch_size=8")
    assert eight.batch_size == 1 and eight.identity == one.identity
    first, second = evaluate_run(one), evaluate_run(eight)
    lengths = {row["prompt_tokens"] > LIMIT for row in first.rows()}
    assert lengths == {False, True}, "rows on both sides of the limit"
    assert answers(first) == answers(second) == by_stock(moved, one, 6)

    words = (*TASK, "batch_size=8", "divergence=true")
    members = [settings(moved, tmp_path / "s", *words, f"method={name}") for name in ("h2o", "window")]
    (group,) = prefill_groups(members)
    assert len(group) == 3
    run_group(group, Session())
    full = evaluate_run(settings(moved, tmp_path / "s", *words, "method=full"))
    assert answers(full) == answers(first)
    for member in members:
        shared = evaluate_run(member)
        apart = evaluate_run(settings(moved, tmp_path / "a", *TASK, "batch_size=1", f"method={member.method.name}"))
        assert answers(shared) == answers(apart) and shared.hash == apart.hash
        assert {line["example"] for line in shared.divergence().values()} == set(answers(shared))


@mostly("dynamic")
def test_questions_about_a_context_and_given_texts(moved, tmp_path):
    words = (
        "task=testbed_qa",
        "task.question=after_eviction",
        "questions=all",
        "limit=6",
        "method=h2o",
        "kv_ratio=0.5",
    )
    one = evaluate_run(settings(moved, tmp_path / "1", *words, "batch_size=1"))
    eight = evaluate_run(settings(moved, tmp_path / "8", *words, "batch_size=8"))
    assert answers(one) == answers(eight) and len(answers(one)) >= 6


def test_runs_that_cannot_be_whole_are_refused_before_weights_load(moved, tmp_path, monkeypatch):
    monkeypatch.setattr("kvexp.run.model_spec.load", lambda spec: pytest.fail("weights were loaded"))
    refused = {
        ("generation.prefill_chunk=64",): "a prompt is read whole: set generation.prefill_chunk=null",
        ("prefill=bounded", "method=h2o", "batch_size=1"): "a prompt is read whole: set prefill=whole",
        ("method=kvzip",): "method kvzip cannot read the prompt a second time",
        ("method=h2o", "cache.positions=renumbered"): "positions=renumbered cannot work with rope_type",
    }
    if "longrope" in str(moved):  # whose prompts decide: only those on the other side of the limit are skipped
        refused = dict(list(refused.items())[3:])
        one = settings(moved, tmp_path, *TASK, "generation.prefill_chunk=64", "method=h2o")
        config, tokenizer = load_config(str(moved)), tokenizer_of(one.model)
        prompts = [prompt_of(one, Weightless(config), tokenizer, example) for example in one.task.examples()]
        why = [budget_obstacle(one, config, tokenizer, prompt) for prompt in prompts]
        assert [each is None for each in why] == [len(prompt.ids) <= LIMIT for prompt in prompts]
        assert len(set(map(bool, why))) == 2
        assert all("chunks of 64 tokens would be turned by others" in each for each in why if each)
    for words, message in refused.items():
        with pytest.raises(ConfigError, match=message):
            settings(moved, tmp_path, *TASK, *words)
    with pytest.raises(ConfigError, match="diagnose feeds answers in one forward"):
        check_diagnosable(settings(moved, tmp_path, *TASK, "method=h2o"))


def test_other_models_keep_their_batches(tmp_path):
    for name in ("testbed_gqa", "testbed_learned", "testbed_alibi"):
        words = (f"model={name}", *TASK, f"outputs_dir={tmp_path}")
        config, choices = composed(*words)
        made = settings_of(config, choices, list(words))
        assert made.batch_size == 8


# -- the length of the model -------------------------------------------------------------------------------------------


def scaled(kind, factor=4.0, **more):
    return {"rope_type": kind, "factor": factor, **more}


LENGTHS = {
    "default": ({"rope_type": "default"}, 128),
    "linear": (scaled("linear"), 512),
    "dynamic": (scaled("dynamic"), 512),
    "yarn": (scaled("yarn"), 512),
    "yarn of 40": (scaled("yarn", original_max_position_embeddings=40), 160),
    "yarn of 32, its config stretched": (scaled("yarn", original_max_position_embeddings=32), 128),
    "yarn of 32, its config stretched more": (scaled("yarn", 2.0, original_max_position_embeddings=32), 128),
    "longrope": (rope_of("longrope", 14, 32), 128),
    "llama3": (
        scaled("llama3", 32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
        128,
    ),
}


@pytest.mark.parametrize(("rope", "holds"), LENGTHS.values(), ids=LENGTHS)
def test_a_rope_factor_lengthens_the_context(rope, holds):
    model = stock("llama", rope_parameters=Hashable(rope | {"rope_theta": 10000.0}), max_position_embeddings=128)
    assert max_positions(model.config) == holds
    prompt = torch.randint(0, VOCAB, (holds - 1,), generator=torch.Generator().manual_seed(3)).tolist()
    model = patch_model(copy.deepcopy(model))
    assert len(generate(model, [prompt], Full(), decoding=GenerationParams(2, eos=None)).tokens[0]) == 2
    with pytest.raises(ConfigError, match=f"the model holds {holds}.*beyond_context"):
        generate(model, [prompt], Full(), decoding=GenerationParams(3, eos=None))


# -- other things that look across rows --------------------------------------------------------------------------------


def compressed(strategy):
    inputs = {"dynamic": True, "strategy": strategy}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"input_activations": inputs}}}


@pytest.mark.parametrize(
    ("quantised", "refused"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, True),
        ({"quant_method": "torchao", "quant_type": "float8_dynamic_activation_float8_weight"}, True),
        (compressed("tensor"), True),
        (compressed("token"), False),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, False),
        ({"quant_method": "gptq", "bits": 4}, False),
    ],
)
def test_activations_that_are_rounded_by_all_rows_are_refused(quantised, refused, tmp_path):
    config = json.loads((TESTBED / "config.json").read_text()) | {"quantization_config": quantised}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if not refused:
        assert load_config(str(tmp_path)).quantization_config == quantised
        return
    with pytest.raises(ConfigError, match="rounds activations by the values of a whole forward"):
        load_config(str(tmp_path))
    model = copy.deepcopy(stock("llama"))
    model.config.quantization_config = quantised
    with pytest.raises(ConfigError, match="rows and chunks would change each other"):
        patch_model(model)
