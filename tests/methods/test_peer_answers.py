"""kvpress's own evaluation and protocol=kvpress give the same answers; exported by `make peers`."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from commands import composed
from peer_export import PeerExport

from kvexp import generate as generation
from kvexp.run.settings import batch_cache, settings_of

pytestmark = pytest.mark.peers
METHODS = {
    "knorm": ("method=knorm",),
    "streaming_llm": ("method=streaming_llm", "method.n_sinks=4", "cache.positions=original"),
    "snapkv": ("method=snapkv", "method.window=7", "method.kernel=5", "method.pool=avg"),
    "expected_attention": ("method=expected_attention", "method.n_future=31"),
}


@functools.cache
def exported() -> PeerExport:
    return PeerExport("kvpress_answers")


def theirs(method: str, ratio: float) -> list[object]:
    found: list[object] = exported()[f"{method}/{ratio}"].tolist()
    return found


def answers(method: str, ratio: float, *changes: str) -> list[object]:
    """Answers of kvexp to all questions, of copies of each context's cache; -1 behind an end."""
    export = exported()
    model = export.model()
    model.generation_config.eos_token_id = end = export.about["case"]["config"]["eos_token_id"]
    words = ("protocol=kvpress", "model=tiny", "task=news_qa", *METHODS[method], f"kv_ratio={1 - ratio}", *changes)
    settings = settings_of(*composed(*words))
    assert settings.task.question == "after_eviction"
    made = np.full(np.shape(theirs(method, ratio)), -1)
    for c, words_of in enumerate(export["contexts"].tolist()):
        ids = [0, *words_of]  # the pipeline puts the start token in front
        cache = batch_cache(settings, [len(ids)])
        context = generation.prefill(model, [ids], cache, max_new_tokens=made.shape[2], seeds=[0])
        for q, asked in enumerate(export["questions"].tolist()):
            result = generation.generate_from_contexts(
                model, [context.fork([0])], [asked], max_new_tokens=made.shape[2]
            )[0]
            words = [token for token in result.tokens[0] if token != end]  # kvpress's text leaves it out
            made[c, q, : len(words)] = words
    found: list[object] = made.tolist()
    return found


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.875])
@pytest.mark.parametrize("method", METHODS)
def test_the_same_answers(method: str, ratio: float) -> None:
    assert answers(method, ratio) == theirs(method, ratio)


def test_the_protocol_is_what_makes_them_the_same() -> None:
    """Half of a cache that goes on evicting while question and answer come gives others, and so does another press."""
    assert answers("knorm", 0.5, "cache.evict_every=1") != theirs("knorm", 0.5)
    assert answers("knorm", 0.5) != theirs("snapkv", 0.5)
    assert len({str(theirs(name, 0.0)) for name in METHODS}) == 1, "nothing is dropped at 0"
    assert theirs("knorm", 0.0) != theirs("knorm", 0.5)
