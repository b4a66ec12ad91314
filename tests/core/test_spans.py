"""Marked spans: which slots stay, held against a loop over tokens; what has no marks or no room; runs with keep=..."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_bounded_prefill import settings
from test_kept_sets import METHODS
from tiny import LAYERS, Streams, prompts_of, tiny
from turns import in_turn

from kvexp.core import AttentionParams, Budget, CacheConfig, EvictionLayer, SequenceState
from kvexp.core.budget_shares import LayerBudgets
from kvexp.core.eviction import CacheState
from kvexp.core.ranking import spare
from kvexp.core.sequence import MarkedSpans
from kvexp.core.slot_order import select_keep
from kvexp.generate import generate, prefill, prefill_together
from kvexp.generate.inputs import GenerationParams
from kvexp.hf import EvictionCache
from kvexp.hf.load import byte_tokenizer
from kvexp.methods import H2O, TOVA, Full, Ideal, StreamingLLM, Window
from kvexp.run.batches import evaluate_run
from kvexp.run.prompts import token_spans
from kvexp.run.store import run_hash
from kvexp.tasks import Example
from kvexp.util import ConfigError

# Not those that need a calibration, a surrogate or a second pass, that choose slots themselves, or whose layers have
# budgets that hold no span.
TRIED = [
    name
    for name, case in METHODS.items()
    if case.method.evicts and not case.method.in_order and type(case.method.layer_budgets) is LayerBudgets
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
