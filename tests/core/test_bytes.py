"""Budgets in bytes: what slots take by the configuration alone, and what a cache of that budget then really holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import composed
from test_quantised import streams_of
from tiny import prompts_of, run_core, tiny
from turns import in_turn

from kvexp.core import Budget, BytesBudget, CacheConfig, Quantization
from kvexp.core.budget import PromptSizes
from kvexp.core.quantized import SlotBytes, bytes_at_16
from kvexp.generate import GenerationParams, generate, receipts
from kvexp.lm_eval import check_row_mask
from kvexp.methods import H2O, Full, Random, StreamingLLM, Window
from kvexp.results.read import folders
from kvexp.results.table import table
from kvexp.retrieval import PQCache, SparQ
from kvexp.run import plan as cost
from kvexp.run.batches import evaluate_run
from kvexp.run.build import STORAGE, build_cache
from kvexp.run.labels import QUANTISED_FULL, check_idle, check_values
from kvexp.run.model_spec import check_cache_fits_model
from kvexp.run.plan import model_shape
from kvexp.run.settings import Settings, settings_of
from kvexp.run.store import run_hash
from kvexp.util.errors import ConfigError

# Quantised slots from the command line: settings, what identifies a run, labels, rows and tables.


def settings(*overrides: str) -> Settings:
    config, choices = composed(*overrides)
    return settings_of(
        config, choices, [word for word in overrides if not word.startswith(("method=", "outputs_dir="))]
    )


def test_the_configurations_defaults_are_the_classs() -> None:
    made = settings("cache.bits=4").cache.quantization
    assert made == Quantization(4, 4)


def test_bits_of_keys_and_of_values() -> None:
    given = ("cache.bits=4", "cache.value_bits=2", "cache.residual=7", "cache.group=8", "cache.key_axis=token")
    assert settings(*given).cache.quantization == Quantization(4, 2, "token", group=8, residual=7)
    assert settings("cache.key_bits=8").cache.quantization == Quantization(8, 16)
    assert settings("cache.bits=8", "cache.key_bits=16", "cache.value_bits=16").cache.quantization is None


def test_a_run_in_sixteen_bits_is_the_run_it_was() -> None:
    """No hash moves: the new settings are in the identity of quantised runs alone."""
    plain, quantised = settings("method=h2o"), settings("method=h2o", "cache.bits=4")
    assert plain.identity == settings("method=h2o", "cache.bits=16").identity
    assert "quantization" not in plain.identity
    assert quantised.identity == plain.identity | {"quantization": quantised.identity["quantization"]}
    other = settings("method=h2o", "cache.bits=4", "cache.residual=5")
    assert run_hash(other.identity) != run_hash(quantised.identity)


def test_a_full_cache_in_few_bits_is_no_baseline() -> None:
    full, coded = settings("method=full", "cache.bits=16"), settings("method=full", "cache.bits=4")
    assert full.is_baseline and not coded.is_baseline
    assert full.identity == coded.baseline().identity and coded.labels["method"] == QUANTISED_FULL
    assert full.labels["method"] == "full" and full.labels["setting"] == ""
    assert coded.labels["setting"] == "cache.bits=4"
    assert run_hash(full.identity) != run_hash(coded.identity)


def test_a_folder_of_before_still_makes_its_settings() -> None:
    config, choices = composed()
    config["cache"] = {name: value for name, value in config["cache"].items() if name not in STORAGE}
    assert settings_of(config, choices).cache.quantization is None


def test_rows_and_the_table(tmp_path: Any) -> None:
    given = (
        f"outputs_dir={tmp_path}",
        "task.max_new_tokens=4",
        "task.nll=false",
        "limit=2",
        "cache.group=8",
        "cache.residual=8",
        "kv_ratio=0.5",
    )
    held = {}
    for method, bits in (("full", 16), ("full", 4), ("h2o", 16), ("h2o", 4)):
        run = evaluate_run(settings(*given, f"method={method}", f"cache.bits={bits}"))
        held[method, bits] = [row["receipt"]["kv_bytes"] for row in run.rows()]
    for method in ("full", "h2o"):
        assert all(2 < plain / coded < 4 for plain, coded in zip(held[method, 16], held[method, 4], strict=True))
    found = {(folder.labels["method"], folder.labels["setting"]): folder for folder in folders(tmp_path)}
    assert [folder.labels["method"] for folder in found.values() if folder.is_baseline] == ["full"]
    assert not any(folder.void for folder in found.values())
    frame = table(tmp_path).set_index("method")
    assert set(frame.index) == {"full", QUANTISED_FULL, "h2o"}
    assert frame.loc[QUANTISED_FULL, "kv_bytes"] < frame.loc["full", "kv_bytes"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["cache.bits=3"], "cache.bits must be one of 16, 8, 4, 2, got 3"),
        (["cache.key_bits=5"], "cache.key_bits must be one of 16, 8, 4, 2 or null, got 5"),
        (["cache.bits=4", "cache.group=0"], "cache.group must be at least 1, got 0"),
        (["cache.bits=4", "cache.residual=none"], "cache.residual must be a whole number, got 'none'"),
        (["cache.bits=4", "cache.key_axis=head"], "cache.key_axis must be one of channel, token, got 'head'"),
        (["cache.bits=4", "cache.mode=mask"], "set cache.mode=overwrite or cache.mode=compact"),
        (["cache.bits=4", "method=ideal"], "cache.mode=mask is a simulation"),
        (["cache.bits=4", "method=pqcache"], "cache.key_bits and cache.value_bits below 16 go with methods that evict"),
    ],
)
def test_errors_name_the_keys_as_they_are_typed(given: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as told:
        settings(*given)
    assert words in str(told.value)


def test_a_group_that_does_not_divide_the_head_is_told_before_a_model_loads() -> None:
    wrong = settings("cache.bits=4")
    with pytest.raises(
        ConfigError, match=r"cache\.group=32 does not divide the 16 channels .* set cache\.group=2 or 4"
    ):
        check_cache_fits_model(wrong.model, wrong.cache)
    fits = settings("cache.bits=4", "cache.group=8")
    check_cache_fits_model(fits.model, fits.cache)


def test_settings_of_codes_without_codes_are_idle() -> None:
    config, choices = composed("cache.residual=5")
    with pytest.raises(
        ConfigError, match=r"cache\.residual has no effect with cache\.bits=16.* leave out cache\.residual=5"
    ):
        check_idle(config, choices, ["cache.residual=5"])
    check_idle(config, choices, ["cache.bits=16", "cache.residual=5"])  # one job of a sweep over bits
    config, choices = composed("cache.residual=5", "cache.key_bits=4")
    check_idle(config, choices, ["cache.residual=5", "cache.key_bits=4"])


def test_a_row_mask_has_no_codes() -> None:
    cache = build_cache(H2O(), Budget(kv_ratio=0.5), {"bits": 4})
    with pytest.raises(ConfigError, match=r"protocol=row_mask .*: set cache\.bits=16"):
        check_row_mask(cache, "local")
    assert build_cache(Full(), None, {}).quantization is None


# Budgets in bytes: what slots take by the configuration alone, and what a cache of that budget then really holds.


HOWS = [
    None,
    Quantization(8, 8, group=16, residual=9),
    Quantization(4, 4, group=16, residual=9),
    Quantization(2, 2, group=16, residual=0),
    Quantization(4, 2, "token", "channel", group=16, residual=20),
    Quantization(2, 4, "token", "token", group=16, residual=20, symmetric=True),
    Quantization(4, 16, group=16, residual=9),
]


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("tokens", [10, 57])
def test_bytes_by_the_configuration_are_those_of_the_buffers(how: Quantization | None, tokens: int) -> None:
    """A prompt of which nothing is evicted, in float16: every buffer as wide as its tokens."""
    streams = streams_of(1, tokens, batch=1, heads=1, group=1, dim=32, value_dim=48, dtype=torch.float16)
    config = CacheConfig(Window(), Budget(tokens=10**6), mode="compact", quantization=how)
    held = run_core(config, streams, [tokens]).states[0].require_slots()
    assert held.positions.shape[2] == tokens
    assert SlotBytes(32, 48, how).of(tokens) == held.kv_bytes


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_the_largest_number_of_slots_that_fits(how: Quantization | None) -> None:
    counted = SlotBytes(32, 48, how)
    each = [counted.of(slots) for slots in range(400)]
    assert each == sorted(each)
    for limit in (each[1] - 1, each[1], 3000, each[255], each[255] - 1, 24000.5):
        slots = counted.most_slots(limit)
        assert (slots == 0 or counted.of(slots) <= limit) and counted.of(slots + 1) > limit


@pytest.mark.parametrize("share", [0.5, 0.25])
@pytest.mark.parametrize("how", HOWS, ids=str)
def test_a_cache_holds_no_more_than_its_share(how: Quantization | None, share: float) -> None:
    """After the prompt's eviction and through decode steps, in float16; up to three slots more, for a stack's width."""
    tokens, width = 400, 32
    streams = streams_of(2, tokens + 40, batch=1, heads=2, group=1, dim=width, value_dim=width, dtype=torch.float16)
    budget = BytesBudget(bytes_ratio=share, key_dim=width, value_dim=width, quantization=how)
    state = run_core(CacheConfig(H2O(), budget, quantization=how), streams, [tokens, *[1] * 40]).states[0]
    full = 2 * tokens * 2 * width * 2
    (slots,) = budget.resolve(PromptSizes([tokens], tokens, None, 1), 0)
    per_slot = 2 * (SlotBytes(width, width, how).of(slots + 3) - SlotBytes(width, width, how).of(slots))
    few = 0 if how is None or how.key_axis == "token" else 2 * 3 * (2 * width * 2 + 8)  # groups of few survivors
    few += 0 if how is None or how.value_axis == "token" else 2 * 3 * (2 * width * 2 + 8)
    least = 0.8 * share * full if slots < tokens else 0  # else there are more slots than tokens
    assert least < state.memory_tracker.bytes <= share * full + per_slot + few


def test_few_bits_hold_more_tokens_than_there_are() -> None:
    how = Quantization(2, 2)
    budget = BytesBudget(bytes_ratio=0.5, quantization=how)
    (slots,) = budget.resolve(PromptSizes([1000], 1000, None, 1), 0)
    assert slots > 2000
    (half,) = BytesBudget(bytes_ratio=0.5).resolve(PromptSizes([1000], 1000, None, 1), 0)
    assert half == 500


def test_a_budget_in_bytes_runs_like_the_same_number_of_slots() -> None:
    model, rows, decoding = tiny("llama"), prompts_of(3, (40,)), GenerationParams(8, eos=None)
    how = Quantization(4, 4, group=7, residual=6)
    budget = BytesBudget(bytes_ratio=0.6, key_dim=14, value_dim=14, quantization=how)
    (slots,) = budget.resolve(PromptSizes([40], 40, None, 1), 0)
    made = [
        generate(model, rows, H2O(), b, decoding=decoding, quantization=how) for b in (budget, Budget(tokens=slots))
    ]
    assert made[0].tokens == made[1].tokens and 10 < slots < 40


@pytest.mark.parametrize("offload", [True, False])
def test_retrieval_methods_stand_on_the_same_axis(offload: bool) -> None:
    """In a float32 model, floating-point numbers halve, PQCache's codes do not, which are offloaded with the keys."""
    model, rows, decoding = tiny("llama"), prompts_of(3, (40,)), GenerationParams(4, eos=None)
    for method in (SparQ(r=4, offload=offload), PQCache(b=3, offload=offload, cache_tokens=0)):
        (held,) = receipts(generate(model, rows, method, Budget(kv_ratio=0.5), decoding=decoding).cache)
        assert held.kv_bytes_at_16 is not None
        codes = 2 * held.kv_bytes_at_16 - held.kv_bytes
        if offload or isinstance(method, SparQ):
            assert codes == 0
        else:
            assert 0 < codes < held.kv_bytes / 2
    for quantization in (None, Quantization(4, 4, group=7, residual=6)):
        made = generate(model, rows, Full(), decoding=decoding, quantization=quantization)
        assert (receipts(made.cache)[0].kv_bytes_at_16 is None) == (quantization is None)


def test_numbers_count_as_sixteen_bits_whatever_their_dtype() -> None:
    a, b, c = torch.zeros(3, dtype=torch.float32), torch.zeros(5, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    assert bytes_at_16(a, b, c) == 6 + 5 + 16 and bytes_at_16(a.half(), a.double()) == 12


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"bytes_ratio": 1.5}, r"bytes_ratio must be in \(0, 1\], got 1.5"),
        ({"bytes_ratio": 0.5, "kv_ratio": 0.5}, "bytes_ratio=0.5 is a budget by itself"),
        ({"bytes_ratio": 0.5, "of": "rest"}, "of must be one of prompt, padded, sequence"),
        ({"bytes_ratio": 0.5, "key_dim": 0}, "key_dim must be at least 1"),
    ],
)
def test_budgets_that_mean_nothing_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BytesBudget(**given)


def test_a_share_that_holds_no_slot_is_told() -> None:
    with pytest.raises(
        ConfigError, match=r"bytes_ratio=0.01 of a prompt of 20 tokens is 51 bytes .* one slot takes 256"
    ):
        BytesBudget(bytes_ratio=0.01).resolve(PromptSizes([20], 20, None, 1), 0)


def test_the_command_line_makes_it_of_the_models_head() -> None:
    made = settings("bytes_ratio=0.25", "cache.bits=4", "cache.group=8")
    assert isinstance(made.budget, BytesBudget)
    assert (made.budget.key_dim, made.budget.quantization) == (16, made.cache.quantization)
    assert made.labels["setting"] == "bytes_ratio=0.25 cache.bits=4 cache.group=8" and made.labels["kv_ratio"] is None
    assert made.identity["budget"]["bytes_ratio"] == 0.25
    assert isinstance(settings("method=full", "bytes_ratio=0.25").method, Full)
    assert "bytes_ratio" not in str(settings("method=h2o").identity)
    with pytest.raises(ConfigError, match=r"bytes_ratio=0.25 and budget.tokens=256 are two budgets"):
        settings("bytes_ratio=0.25", "budget=tokens")
    with pytest.raises(ConfigError, match=r"method pqcache keeps everything: .* kv_ratio in place of bytes_ratio"):
        settings("bytes_ratio=0.25", "method=pqcache")
    with pytest.raises(ConfigError, match=r"task.pad_to=64 makes pads count towards a ratio of tokens"):
        settings("bytes_ratio=0.25", "task.pad_to=64", "budget.of=padded")
    config = {"kv_ratio": 0.3, "bytes_ratio": 0.25, "cache": {}}
    with pytest.raises(ConfigError, match=r"kv_ratio has no effect with bytes_ratio=0.25: leave out kv_ratio=0.3"):
        check_idle(config, {}, ["kv_ratio=0.3", "bytes_ratio=0.25"])
    wrong = {"limit": None, "seed": 0, "batch_size": 1, "retry": False, "outputs_dir": "x"}
    with pytest.raises(ConfigError, match=r"bytes_ratio must be in \(0, 1\] or null, got 2"):
        check_values(wrong | {"bytes_ratio": 2}, {})


# Plans of quantised caches: the bytes that they say are those that a run's ledger then holds.


FEW = (
    "model=testbed_rope",
    "task=testbed_summary",
    "limit=1",
    "batch_size=1",
    "task.max_new_tokens=40",
    "generation.eos=null",
    "divergence=false",
    "cache.group=16",
)


def planned_bytes(given, prompt):
    """(of the slots that the run keeps, of what the plan's line says): bytes of one prompt."""
    shape = model_shape(given.model)
    return cost.slots_bytes(shape, given, cost.slots_of(given, prompt)), cost.kv_bytes(shape, [given], prompt)


@pytest.mark.parametrize(("bits", "method"), in_turn([8, 4, 2], ["h2o", "full"], of=2))
def test_the_bytes_of_a_plan_are_those_that_the_run_holds(method: str, bits: int, tmp_path: Path) -> None:
    given = settings(*FEW, f"method={method}", "kv_ratio=0.5", f"cache.bits={bits}", f"outputs_dir={tmp_path}")
    (row,) = evaluate_run(given).rows()
    held, prompt = row["receipt"]["kv_bytes"], row["prompt_tokens"]
    planned, line = planned_bytes(given, prompt)
    assert row["new_tokens"] == 40
    assert planned == (held if method == "full" else pytest.approx(held, rel=0.02))
    token = model_shape(given.model).token_bytes("float32")
    assert line == planned + token * prompt, "the prompt is read as it is"


def test_a_page_counts_whole_where_any_head_holds_a_token_of_it():
    """40 tokens and 3 more, less the last, which is not fed: a window of 20 lies in pages 1 and 2 of 16 tokens each."""
    prompt = prompts_of(3, (40,))
    for method, budget, slots, pages in (
        (Full(), None, 42, 48),
        (Window(), Budget(tokens=20, counts_self=False), 20, 32),
        (StreamingLLM(n_sinks=4), Budget(tokens=14, counts_self=False), 14, 32),
    ):
        made = generate(tiny("llama"), prompt, method, budget, decoding=GenerationParams(3, eos=None))
        (receipt,) = receipts(made.cache)
        assert (receipt.slots, receipt.page_slots) == (slots, pages)
    made = generate(tiny("llama"), prompt, Random(), Budget(tokens=9), decoding=GenerationParams(3, eos=None))
    held = [layer.kept_positions()[0] for layer in made.cache.layer_states]
    assert len(set(map(tuple, held[0]))) > 1  # heads differ
    both = [{position // 16 for head in heads for position in head} for heads in held]
    assert receipts(made.cache)[0].page_slots == 16 * sum(map(len, both)) / 2
