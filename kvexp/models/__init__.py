"""The only package that knows Hugging Face: loading, the cache, the attention hook, two adapters."""

from kvexp.deprecation import deprecated_names
from kvexp.models.batched_cache import MultiMethodCache
from kvexp.models.cache import EvictionCache
from kvexp.models.load import load_model, load_tokenizer, random_model
from kvexp.models.patch import install
from kvexp.models.row_mask_cache import RowMaskCache

__all__ = [
    "EvictionCache",
    "MultiMethodCache",
    "RowMaskCache",
    "install",
    "load_model",
    "load_tokenizer",
    "random_model",
]

__getattr__ = deprecated_names(__name__, {"JoinedCache": ("MultiMethodCache", MultiMethodCache)})
