"""Hugging Face's side of kvexp: loading models, patching their attention, the cache, adapters for GPT-J and MPT."""

from kvexp.models.batched_cache import MultiMethodCache
from kvexp.models.cache import EvictionCache
from kvexp.models.calibration_pass import calibrate_heads, calibrate_queries
from kvexp.models.cpu_linear import pack_linear, unpack_linear
from kvexp.models.load import load_model, load_tokenizer, random_model
from kvexp.models.patch import is_patched, patch_model, patched, unpatch_model
from kvexp.models.row_mask_cache import RowMaskCache
from kvexp.models.surrogate_pass import train_surrogate

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
