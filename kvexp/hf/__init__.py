"""Hugging Face's side of kvexp: loading models, patching their attention, the cache, adapters for GPT-J and MPT."""

from __future__ import annotations

from kvexp.hf.attach import is_patched, patch_model, patched, unpatch_model
from kvexp.hf.cache import EvictionCache, MultiMethodCache, RowMaskCache
from kvexp.hf.calibrate import calibrate_heads, calibrate_queries, train_surrogate
from kvexp.hf.cpu_linear import pack_linear, unpack_linear
from kvexp.hf.load import load_model, load_tokenizer, random_model

__all__ = [
    "EvictionCache",
    "MultiMethodCache",
    "RowMaskCache",
    "calibrate_heads",
    "calibrate_queries",
    "is_patched",
    "load_model",
    "load_tokenizer",
    "pack_linear",
    "patch_model",
    "patched",
    "random_model",
    "train_surrogate",
    "unpack_linear",
    "unpatch_model",
]
