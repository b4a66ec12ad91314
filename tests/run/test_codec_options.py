"""`cache.codec` on the command line: which settings it makes, what is refused, and that older runs keep their names."""

from __future__ import annotations

import pytest
from commands import composed

from kvexp.core import EngineQuantization, Quantization
from kvexp.run.labels import check_idle
from kvexp.run.settings import settings_of
from kvexp.util import ConfigError

RUN = ("model=testbed_rope", "task=testbed_summary", "method=h2o", "kv_ratio=0.5")
MADE = {
    "cache.codec=fp8": EngineQuantization("fp8"),
    "cache.codec=q4_0 cache.residual=16": EngineQuantization("q4_0", residual=16),
    "cache.codec=turboquant": EngineQuantization("turboquant", 4, 4),
    "cache.codec=turboquant cache.bits=3 cache.signs=true": EngineQuantization("turboquant", 3, 3, signs=True),
    "cache.codec=turboquant cache.key_bits=8 cache.value_bits=3": EngineQuantization("turboquant", 8, 3),
    "cache.bits=4": Quantization(4, 4, residual=32),
    "cache.bits=4 cache.residual=8": Quantization(4, 4, residual=8),
    "cache.bits=16": None,
}


@pytest.mark.parametrize("words", MADE)
def test_words_make_a_quantisation(words):
    settings = settings_of(*composed(*RUN, *words.split()))
    assert settings.cache.quantization == MADE[words]
    assert ("quantization" in settings.identity) is (MADE[words] is not None)


def test_kivis_runs_are_known_by_what_they_were_known_by():
    """The fields, and no others, that identified such a run before there were codecs."""
    fields = {"key_bits": 4, "value_bits": 4, "key_axis": "channel", "value_axis": "token", "group": 32, "residual": 32}
    settings = settings_of(*composed(*RUN, "cache.bits=4"))
    assert settings.identity["quantization"] == {**fields, "symmetric": False}
    names = [settings_of(*composed(*RUN, f"cache.codec={codec}")).identity for codec in ("fp8", "u8", "q8_0")]
    assert len({str(name) for name in names}) == 3


REFUSED = {
    "cache.codec=q5_0": r"cache\.codec must be",
    "cache.codec=fp8 cache.group=16": r"cache\.group has no effect with cache\.codec=fp8.*cache\.codec=kivi",
    "cache.codec=fp8 cache.bits=8": r"cache\.bits has no effect with cache\.codec=fp8",
    "cache.signs=true": r"cache\.signs has no effect with cache\.codec=kivi.*cache\.codec=turboquant",
    "cache.codec=turboquant cache.bits=2": r"cache\.bits must be",
    "cache.codec=turboquant cache.value_bits=8": r"values in 4 or 3, got cache\.key_bits=4 and cache\.value_bits=8",
    "cache.bits=3": r"cache\.bits must be",
    "cache.codec=q8_0 method=quest": "keeps everything",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_means_nothing_is_refused(words):
    def made():
        check_idle(*composed(*RUN, *words.split()), words.split())
        return settings_of(*composed(*RUN, *words.split()))

    with pytest.raises(ConfigError, match=REFUSED[words]):
        made()
