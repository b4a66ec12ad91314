"""The five kinds of layer that can stand behind Hugging Face's cache have what the protocol says, called as it says."""

import inspect

import pytest

from kvexp.core import EvictionLayer
from kvexp.core.layer_cache import LayerCache, RowsCache
from kvexp.core.masked_layer import MaskedLayer
from kvexp.diagnose.twin import TwinLayer
from kvexp.models.batched_cache import MultiLayer
from kvexp.retrieval.retrieval_layer import RetrievalLayer

EVERY = [EvictionLayer, RetrievalLayer, MaskedLayer, MultiLayer, TwinLayer]
WITH_ROWS = [EvictionLayer, RetrievalLayer]


def methods(protocol):
    return {name for name, member in vars(protocol).items() if inspect.isfunction(member) and not name.startswith("_")}


def parameters(function):
    return [
        (each.name, each.kind, each.default is each.empty) for each in inspect.signature(function).parameters.values()
    ]


@pytest.mark.parametrize(("kind", "protocol"), [(k, LayerCache) for k in EVERY] + [(k, RowsCache) for k in WITH_ROWS])
def test_it_is_called_as_the_protocol_says(kind, protocol):
    assert methods(protocol) >= (
        {"forward", "select_rows", "reset"} if protocol is LayerCache else {"copy_rows_from", "kept_positions"}
    )
    for name in methods(protocol):
        assert parameters(getattr(kind, name)) == parameters(getattr(protocol, name)), (kind.__name__, name)


@pytest.mark.parametrize("kind", WITH_ROWS)
def test_what_only_an_object_has_is_there_too(kind):
    """Attributes are no part of a class: those of a new layer."""
    from kvexp.core import Budget, CacheConfig, MemoryTracker, SequenceState
    from kvexp.methods import H2O
    from kvexp.retrieval import Quest
    from kvexp.retrieval.retrieval_layer import LayerGroup

    budget, common = Budget(tokens=8), (0, 1, SequenceState(), MemoryTracker(1))
    retrieves = kind is RetrievalLayer
    layer = kind(CacheConfig(Quest() if retrieves else H2O(), budget), *common, LayerGroup() if retrieves else None)
    assert (layer.seq_len, layer.slots, layer.first_eviction, layer.retained_attention) == (0, None, [], None)
    assert isinstance(layer.heavy_buffers, list)


def test_layers_that_decode_together_keep_their_rows():
    import torch
    from tiny import tiny

    from kvexp.core import Budget
    from kvexp.errors import CacheError
    from kvexp.methods import H2O
    from kvexp.models import EvictionCache, MultiMethodCache

    joined = MultiMethodCache([EvictionCache(tiny("llama"), H2O(), Budget(tokens=9)) for _ in range(2)], 1)
    with pytest.raises(CacheError, match="fork"):
        joined.reorder_cache(torch.tensor([0]))
    with pytest.raises(CacheError, match="reset"):
        joined.reset()
