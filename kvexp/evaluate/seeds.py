"""The seed of one example: a function of its id, so that no draw knows where it stands or what is run beside it."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from kvexp.tasks import Example

if TYPE_CHECKING:
    from kvexp.config.settings import Settings


def sampling_seed(settings: Settings, example: Example) -> int:
    """Of the draws between tokens: the example's own, in any order of the rows and with any others left out."""
    return settings.seed + zlib.crc32(example.id.encode())


def noise_seed(settings: Settings, example: Example, *, asked: bool) -> int:
    """Of the noise inside methods. asked: a question follows the context, whose noise all its questions then share."""
    return settings.seed + zlib.crc32(example.prompt.encode()) if asked else sampling_seed(settings, example)
