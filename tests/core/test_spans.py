"""Marked spans: which slots stay, held against a loop over tokens; what has no marks or no room; runs with keep=..."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import CASES
from test_bounded_prefill import settings
from test_kept_sets import METHODS
from tiny import LAYERS, Streams, prompts_of, run_core, tiny
from turns import in_turn

from kvexp.core import AttentionParams, Budget, CacheConfig, Cadence, ChoosesSlots, EvictionLayer, SequenceState
from kvexp.core.budget import BytesBudget, PromptSizes
from kvexp.core.budget_resolution import resolve_layer_slots
from kvexp.core.budget_shares import LayerBudgets
from kvexp.core.eviction import CacheState
from kvexp.core.method import Method
from kvexp.core.ranking import spare
from kvexp.core.sequence import MarkedSpans
from kvexp.core.slot_order import select_keep
from kvexp.generate import generate, prefill, prefill_together
from kvexp.generate.inputs import GenerationParams
from kvexp.hf import EvictionCache
from kvexp.hf.load import byte_tokenizer
from kvexp.methods import H2O, TOVA, Full, Ideal, Keyformer, Random, SnapKV, StreamingLLM, Window
from kvexp.run.batches import evaluate_run
from kvexp.run.prompts import token_spans
from kvexp.run.store import run_hash
from kvexp.tasks import Example
from kvexp.util.errors import ConfigError

# Not those that need a calibration, a surrogate or a second pass, that choose slots themselves, or whose layers have
# budgets that hold no span.
TRIED = [
    name
    for name, case in METHODS.items()
    if case.method.evicts and type(case.method.layer_budgets) is LayerBudgets
    if not isinstance(case.method, ChoosesSlots)
    if not (case.method.needs.calibration or case.method.needs.surrogate or case.method.needs.second_pass)
]
SIX = GenerationParams(6, eos=None)


def kept_by_hand(
    keep: str, priority: list[float], spans: list[tuple[int, int]], slots: int, sinks: int, recent: int
) -> list[int]:
    """The positions of one prompt and head that stay, one decision at a time; slots: kept after the eviction."""
    total = len(priority)
    stay = {p for p in range(total) if p < sinks or p >= total - recent}
    best = sorted(range(total), key=lambda p: (priority[p], p), reverse=True)
    if keep == "span":
        stay |= {p for first, behind in spans for p in range(first, behind)}
        order = best
    else:
        for first, behind in spans:
            share = (slots - sinks - recent) * (behind - first) // total
            inside = [p for p in best if first <= p < behind and p not in stay]
            stay |= set(inside[:share])
        marked = {p for first, behind in spans for p in range(first, behind)}
        order = [p for p in best if p not in marked] + sorted(marked, reverse=True)
    for p in order:
        if len(stay) < slots:
            stay.add(p)
    return sorted(stay)


@pytest.mark.parametrize("keep", ["span", "fair"])
@pytest.mark.parametrize("spans", [[(0, 5)], [(3, 9), (9, 12), (17, 24)], [(20, 24)], []])
def test_what_an_eviction_spares_is_what_a_loop_over_tokens_spares(keep: Any, spans: list[tuple[int, int]]) -> None:
    slots, sinks, recent, total = 19, 2, 3, 24
    priority = torch.rand(2, 3, total, generator=torch.Generator().manual_seed(5))
    priority[0, 1, :9] = 0.25  # ties go by position
    positions = torch.arange(total).expand(2, 3, total)
    both = [spans, [(1, 4)]]
    marked = MarkedSpans.of(both, [total, total])
    protected = (positions < sinks) | (positions >= total - recent)
    allowed: Any = SimpleNamespace(kept=[slots] * 2, recent=[recent] * 2)
    ctx: Any = SimpleNamespace(positions=positions, held=lambda: torch.ones_like(protected))
    changed, guarded = spare(keep, marked, ctx, priority, protected, allowed, sinks)
    index, _ = select_keep(changed, positions, guarded, torch.tensor([slots] * 2), slots)
    for row, each in enumerate(both):
        for head in range(3):
            want = kept_by_hand(keep, priority[row, head].tolist(), each, slots, sinks, recent)
            assert index[row, head].tolist() == want


@pytest.mark.parametrize("mode", ["overwrite", "compact", "mask"])
def test_spans_stay_through_the_answer_in_every_mode_and_whatever_the_padding(mode: Any) -> None:
    streams, mask = Streams.random(3, 40, batch=2).padded([0, 5])
    spans = [[(4, 9)], [(2, 6), (8, 10)]]

    def kept(keep: Any) -> list[Any]:
        config = CacheConfig(H2O(), Budget(tokens=14), mode=mode, keep=keep)
        sequence = SequenceState(prompt_columns=24, max_new_tokens=16)
        sequence.mark_spans(spans, [24, 19])
        layer = EvictionLayer(config, 0, CacheState(config, 1, sequence))
        seen = []
        for start, end in ((0, 24), *((t, t + 1) for t in range(24, 40))):
            part = slice(start, end)
            layer.forward(
                streams.q[0, :, :, part], streams.k[0, :, :, part], streams.v[0, :, :, part],
                AttentionParams(7**-0.5), mask[:, :end],
            )  # fmt: skip
            seen.append(layer.kept_positions())
        return seen

    for keep in ("span", "fair"):
        steps = kept(keep)
        for rows in steps:
            for each, row in zip(spans, rows, strict=True):
                for head in row:
                    inside = [sum(first <= p < behind for p in head) for first, behind in each]
                    if keep == "span":
                        assert inside == [behind - first for first, behind in each]
                    assert len(head) == 13
        if keep == "fair":  # the share of 13 - 6 slots, of prompts of 24 and 19 tokens, and as much to the end
            at_prompt = [[sum(a <= p < b for p in head) for a, b in spans[1]] for head in steps[0][1]]
            assert all(
                count >= share for head in at_prompt for count, share in zip(head, (7 * 4 // 19, 0), strict=True)
            )
            last = [[sum(a <= p < b for p in head) for a, b in spans[1]] for head in steps[-1][1]]
            assert all(head[0] >= 7 * 4 // 19 for head in last)
    assert kept("span") != kept(None)


@pytest.mark.parametrize(("name", "keep"), in_turn(TRIED, ["span", "fair"], of=2))
def test_every_method_spares_marked_spans(name: str, keep: Any) -> None:
    method = METHODS[name].method
    prompts, spans = prompts_of(5, (37, 29)), [[(14, 20)], [(11, 16)]]
    made = generate(
        tiny("llama"), prompts, method, Budget(tokens=16), spans=spans, keep=keep, decoding=SIX, seeds=[3, 4]
    )
    free = generate(tiny("llama"), prompts, method, Budget(tokens=16), decoding=SIX, seeds=[3, 4])
    moved = False
    for layer in range(LAYERS):
        for row, others, ((first, behind),) in zip(
            made.cache.kept_positions(layer), free.cache.kept_positions(layer), spans, strict=True
        ):
            for head, other in zip(row, others, strict=True):
                assert len(head) == len(other)
                moved |= head != other
                if keep == "span":
                    assert set(range(first, behind)) <= set(head)
    assert moved


def test_spans_are_spared_between_chunks_and_go_with_their_rows() -> None:
    model, prompts = tiny("llama"), prompts_of(8, (50,))
    context = prefill(
        model, prompts, TOVA(), Budget(tokens=12), bounded_chunk=10, keep="span", spans=[[(2, 6), (40, 43)]]
    )
    for head in context.cache.kept_positions(1)[0]:
        assert {2, 3, 4, 5, 40, 41, 42} <= set(head) and len(head) == 11
    two = prompts_of(8, (30, 26))
    configs = [CacheConfig(H2O(), Budget(tokens=12), keep="span"), CacheConfig(Full())]
    both, _ = prefill_together(model, two, configs, max_new_tokens=4, spans=[[(2, 6)], [(9, 12)]])
    fork = both.fork([1, 0])
    assert fork.cache.sequence.spans is not None and fork.cache.sequence.spans.lengths == [[3], [4]]
    assert fork.cache.sequence.spans.of_slots(torch.tensor([[[9, 12, -1, 40]], [[9, 2, 3, 6]]])).tolist() == [
        [[0, -1, -1, -1]],
        [[-1, 0, 0, -1]],
    ]


def test_what_cannot_be_spared_is_refused() -> None:
    model, prompt = tiny("llama"), prompts_of(1, (30,))
    with pytest.raises(ConfigError, match="budget of 10 slots cannot hold the 8 marked tokens of keep=span"):
        generate(model, prompt, StreamingLLM(), Budget(tokens=10), keep="span", spans=[[(10, 18)]], decoding=SIX)
    with pytest.raises(ConfigError, match="keep=fair spares marked spans, and nothing of the prompt is marked"):
        generate(model, prompt, Window(), Budget(tokens=10), keep="fair", decoding=SIX)
    with pytest.raises(ConfigError, match="evicts nothing that could be spared"):
        CacheConfig(Ideal(), Budget(tokens=10), mode="mask", keep="span")
    with pytest.raises(ConfigError, match="keep must be one of span, fair, prompt or null, got 'all'"):
        CacheConfig(H2O(), Budget(tokens=10), keep="all")  # type: ignore[arg-type]
    for spans in ([(3, 3)], [(4, 8), (6, 9)], [(28, 31)]):
        with pytest.raises(ConfigError, match="of a prompt of 30; spans are not empty, in order"):
            EvictionCache(model, H2O(), Budget(tokens=20), keep="fair").mark_spans([spans], [30], 30)


# -- marks to tokens ---------------------------------------------------------------------------------------------------


def spans_of(example: Example) -> list[str]:
    tokenizer = byte_tokenizer()
    ids = tokenizer(example.prompt).input_ids
    found = token_spans(example, example.prompt, len(ids), tokenizer, templated=False)
    return [tokenizer.decode(ids[first:behind], skip_special_tokens=True) for first, behind in found]


def test_marks_are_prefix_and_suffix_or_the_examples_own() -> None:
    framed = Example("a", "Sum this up:\nA long text.\nSummary:", "", prefix="Sum this up:\n", body="A long text.",
                     suffix="\nSummary:")  # fmt: skip
    assert spans_of(framed) == ["Sum this up:", "Summary:"]
    own = Example("b", "One rule. A text. Another rule. The end", "", marks=("A text.", "Another rule."))
    assert spans_of(own) == ["A text.", "Another rule."]
    assert spans_of(Example("c", "nothing marked", "")) == []
    assert spans_of(Example("d", "a text", "", marks=("not there",))) == []


def test_what_a_template_puts_in_front_belongs_to_the_first_mark() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "<s>{% for m in messages %}[{{ m.content }}]{% endfor %}"
    example = Example("a", "Be brief. A text.", "", prefix="Be brief. ", body="A text.")
    text = "<s>[Be brief. A text.]"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    ((first, behind),) = token_spans(example, text, len(ids), tokenizer, templated=True)
    assert (first, tokenizer.decode(ids[:behind])) == (0, "<s>[Be brief.")


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_run_that_spares_the_instruction(tmp_path: Any) -> None:
    words = ("model=testbed_rope", "task=news", "method=h2o", "kv_ratio=0.4", "task.max_new_tokens=4", "limit=2")
    plain = settings(tmp_path, *words)
    spared = settings(tmp_path, *words, "keep=fair")
    assert "keep" not in plain.identity and spared.identity["keep"] == "fair"
    assert run_hash(settings(tmp_path, *words, "keep=null").identity) == run_hash(plain.identity)
    assert spared.baseline().identity == plain.baseline().identity
    assert "keep=fair" in spared.labels["setting"] and "keep" not in spared.baseline().labels["setting"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("keep=all",), "keep must be one of span, fair, prompt or null, got 'all'"),
        (("keep=span", "task.truncate=halves"), "set task.truncate=middle or skip"),
        (("keep=span", "method=ideal"), "evicts nothing that could be spared"),
        (("keep=span", "model=tiny", "task=lm_eval", "task.tasks=[copa]"), "does not reach lm-eval's tasks"),
    ],
)
def test_settings_that_exclude_it_are_refused(tmp_path: Any, words: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        settings(tmp_path, *words)
    assert message in str(error.value)


def test_a_task_without_marks_is_told_before_a_model_loads(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="nothing of the prompt is marked"):
        evaluate_run(settings(tmp_path, "model=tiny", "task=sample", "method=h2o", "keep=span"))


# Prompts that are kept whole: what stays, budgets of what is generated, redrawn chance, what is refused.


DECODING = [
    name
    for name in TRIED
    if CASES[name].method.evicts_while_decoding and not isinstance(CASES[name].method, ChoosesSlots)
]


@pytest.mark.parametrize(("name", "mode"), in_turn(DECODING, ["overwrite", "compact", "mask"], of=2))
def test_every_method_keeps_the_prompt_and_fills_the_rest_of_its_budget(name: str, mode: Any) -> None:
    prompts, case = prompts_of(5, (19, 14)), CASES[name]
    budget = Budget(tokens=13, of="generated")
    made = generate(
        tiny("llama"), prompts, case.method, budget, keep="prompt", mode=mode, select=case.select,
        decoding=GenerationParams(25, eos=None), seeds=[3, 4],
    )  # fmt: skip
    for layer in range(LAYERS):
        for prompt, row in zip(prompts, made.cache.kept_positions(layer), strict=True):
            for head in row:
                assert head[: len(prompt)] == list(range(len(prompt))) and len(head) == len(prompt) + 12


@pytest.mark.parametrize("method", [H2O(), TOVA(protect_recent=3), Random(), Random(redraw=True), Window()])
def test_generated_tokens_compete_as_if_the_prompt_were_sinks(method: Method) -> None:
    """Evicting after blocks of four, in every mode, and naively: by the method's own priorities, prompt apart."""
    streams, prompt, width = Streams.random(2, 42, batch=1), 10, 4
    widths = [prompt] + [width] * 8
    seen = {}
    for mode in ("overwrite", "compact", "mask"):
        config = CacheConfig(
            method,
            Budget(tokens=20),
            Cadence(every=4),
            mode=mode,
            keep="prompt",  # type: ignore[arg-type]
        )
        seen[mode] = run_core(config, streams, widths, max_new_tokens=32, seeds=[7])
    assert seen["overwrite"].kept == seen["compact"].kept == seen["mask"].kept
    for step, kept in enumerate(seen["compact"].kept[1:], 1):
        total = prompt + width * step
        for head in kept[0][0]:
            assert head[:prompt] == list(range(prompt)) and len(head) == min(total, 19)
            if isinstance(method, Window):
                assert head[prompt:] == list(range(total - len(head) + prompt, total))
            if isinstance(method, H2O):  # half of the ten slots that are not the prompt's, one for the coming token
                assert set(range(total - 4, total)) <= set(head)


def test_a_budget_of_what_is_generated_comes_on_top_of_each_prompt() -> None:
    def slots(budget: Budget) -> list[int]:
        config = CacheConfig(Random(), budget, keep="prompt")
        return resolve_layer_slots(config, PromptSizes([30, 20], 30, 64, 2), 0, torch.device("cpu")).slots

    assert slots(Budget(kv_ratio=0.25, of="generated")) == [46, 36]
    assert slots(Budget(tokens=12, of="generated")) == [42, 32]
    assert slots(Budget(kv_ratio=0.5, of="sequence")) == [47, 42]
    assert slots(Budget(tokens=40)) == [40, 40]


def test_redrawn_chance_forgets_geometrically_and_a_fixed_lot_does_not() -> None:
    """K slots, P of the prompt, every 8 tokens: a token older than the window survives with (K - 8 - P) / (K - P)."""
    prompt, slots, every, rounds = 8, 40, 8, 10
    streams = Streams.random(1, prompt + 32 + every * rounds, batch=24, heads=8, group=1, dim=2, value_dim=2)
    widths = [prompt, 32] + [every] * rounds

    def by_age(method: Method) -> list[float]:
        config = CacheConfig(
            method, Budget(tokens=slots, counts_self=False), Cadence(every=every), mode="compact", keep="prompt"
        )
        last = run_core(config, streams, widths, seeds=list(range(24))).kept[-1][0]
        total = sum(widths)
        heads = [head for row in last for head in row]
        ages = [range(total - every * (n + 1), total - every * n) for n in range(rounds)]
        return [sum(p in head for head in heads for p in age) / (len(heads) * every) for age in ages]

    redrawn, fixed = by_age(Random(redraw=True, protect_recent=8)), by_age(Random(protect_recent=8))
    assert redrawn[0] == fixed[0] == 1.0
    survives = (slots - 8 - prompt) / (slots - prompt)
    for rounds_lived, share in enumerate(redrawn[1:7], 1):
        assert abs(share - survives**rounds_lived) < 4 * math.sqrt(0.25 / (24 * 8 * 8))
    # Fixed draws leave a uniform sample of everything behind the window.
    expected = (slots - 8 - prompt) / (sum(widths) - prompt - 8)
    assert all(abs(share - expected) < 4 * math.sqrt(0.25 / (24 * 8 * 8)) for share in fixed[1:])


@pytest.mark.parametrize("redraw", [False, True])
def test_draws_are_of_heads_layers_and_blocks_as_asked(redraw: bool) -> None:
    streams = Streams.random(3, 60, layers=2, batch=2)

    def kept(per: Any, block: int = 1) -> list[list[list[int]]]:
        config = CacheConfig(
            Random(redraw=redraw, per=per, block=block), Budget(tokens=28), Cadence(every=5), mode="compact"
        )
        last = run_core(config, streams, [40, 5, 5, 5, 5], seeds=[1, 2]).kept[-1]
        return [heads for layer in last for heads in layer]  # layer 0 row 0, layer 0 row 1, layer 1 ...

    each, layer, model = kept("head"), kept("layer"), kept("model")
    assert all(heads[0] != heads[1] != heads[2] for heads in each)
    assert all(heads[0] == heads[1] == heads[2] for heads in layer) and layer[0] != layer[2]
    assert model[0] == model[2] and model[1] == model[3] and model[0] != model[1]
    for heads in kept("head", block=4):
        for head in heads:
            blocks = {p // 4: sum(q // 4 == p // 4 for q in head) for p in head}
            whole = [n for start, n in blocks.items() if start < 14]  # those that were complete at every eviction
            assert sum(n < 4 for n in whole) <= (5 if redraw else 1)  # each of five evictions cuts one block apart


def test_what_cannot_keep_a_prompt_says_so() -> None:
    tokens = Budget(tokens=40)

    def refused(method: Method, budget: Budget, words: str, **options: Any) -> None:
        with pytest.raises(ConfigError, match=words):
            CacheConfig(method, budget, keep="prompt", **options)

    refused(SnapKV(), tokens, "snapkv evicts at the end of the prompt alone, and keep=prompt leaves it nothing")
    refused(H2O(), tokens, "cache.evict_every=null evicts none", cadence=Cadence(every=None))
    refused(H2O(), tokens, "prefill=bounded evicts between chunks of a prompt", bounded_chunk=8)
    refused(H2O(), Budget(kv_ratio=0.5), "the budget is a share: set budget.of=sequence .* budget.of=generated")
    refused(H2O(), Budget(tokens=40, heads="adaptive"), "leave out keep=prompt")
    refused(Full(), tokens, "evicts nothing that could be spared")
    with pytest.raises(ConfigError, match=r"on top of a prompt that is never evicted: add keep=prompt"):
        CacheConfig(H2O(), Budget(tokens=40, of="generated"))
    with pytest.raises(ConfigError, match=r"budget.of=generated counts slots on top"):
        BytesBudget(bytes_ratio=0.3, of="generated")
    model, prompts = tiny("llama"), prompts_of(1, (30,))
    with pytest.raises(
        ConfigError, match=r"cannot hold the 30 tokens of a prompt that keep=prompt keeps, and recent=5"
    ):
        generate(model, prompts, TOVA(protect_recent=5), Budget(tokens=34), keep="prompt", decoding=SIX)
    with pytest.raises(ConfigError, match=r"budget.of=generated needs max_new_tokens"):
        Budget(kv_ratio=0.5, of="generated").resolve(PromptSizes([3], 3, None, 1), 0)
    generate(model, prompts, StreamingLLM(), Budget(tokens=32), keep="prompt", decoding=SIX)


def test_a_run_that_keeps_its_prompt_and_what_did_not_change(tmp_path: Any) -> None:
    words = ("model=testbed_rope", "task=news", "method=random", "task.max_new_tokens=8", "limit=1")
    kept = settings(tmp_path, *words, "keep=prompt", "budget.of=generated", "method.redraw=true")
    assert kept.identity["keep"] == "prompt" and kept.identity["budget"]["of"] == "generated"
    assert kept.identity["method"] == {"name": "random", "redraw": True}
    plain = settings(tmp_path, *words)
    assert plain.identity["method"] == {"name": "random"}
    assert run_hash(settings(tmp_path, *words, "method.redraw=false").identity) == run_hash(plain.identity)
    settings(tmp_path, *words, "keep=prompt", "budget=tokens", "budget.of=generated")
    with pytest.raises(ConfigError, match=r"set budget\.of=prompt, or questions=each"):
        settings(tmp_path, "questions=all", "method=h2o", "task=news_qa", "keep=prompt", "budget.of=generated")


def test_a_schedule_goes_on_while_the_prompt_is_kept() -> None:
    made = generate(
        tiny("llama"), prompts_of(4, (12,)), Keyformer(), Budget(kv_ratio=0.5, of="generated"), keep="prompt",
        decoding=GenerationParams(20, eos=None),
    )  # fmt: skip
    assert {len(head) for head in made.cache.kept_positions(0)[0]} == {21}
