"""The only package that knows Hugging Face: loading, the cache, the attention hook, two adapters."""

from kvexp.models.cache import EvictionCache
from kvexp.models.install import install
from kvexp.models.load import load_model, load_tokenizer, random_model
from kvexp.models.rowmask import RowMaskCache
from kvexp.models.together import JoinedCache

__all__ = ["EvictionCache", "JoinedCache", "RowMaskCache", "install", "load_model", "load_tokenizer", "random_model"]
