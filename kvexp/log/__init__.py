"""Replays recorded runs into Weights & Biases: kvexp log outputs/ [--project P] [--online].

Everything comes from the run folders, so publishing can wait, fail or be repeated without touching a number. A run's id
is its hash: published again, it is the same run there.
"""

from kvexp.log.mode import check, default_mode
from kvexp.log.publish import publish

__all__ = ["check", "default_mode", "publish"]
