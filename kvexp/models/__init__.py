"""The only package that knows Hugging Face: loading, the cache, the attention hook, two adapters."""

from kvexp.models.cache import EvictionCache
from kvexp.models.install import install
from kvexp.models.load import load_model, load_tokenizer, random_model

__all__ = ["EvictionCache", "install", "load_model", "load_tokenizer", "random_model"]
