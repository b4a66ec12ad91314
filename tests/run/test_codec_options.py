"""`cache.codec` on the command line: which settings it makes, what is refused, and that older runs keep their names."""

from __future__ import annotations

import pytest
from commands import composed

from kvexp.core import EngineQuantization, Quantization
from kvexp.run.labels import check_idle
from kvexp.run.settings import settings_of
from kvexp.util.errors import ConfigError

RUN = ("model=testbed_rope", "task=testbed_summary", "method=h2o", "kv_ratio=0.5")
MADE = {
    "cache.codec=fp8": EngineQuantization("fp8"),
    "cache.codec=q4_0 cache.residual=16": EngineQuantization("q4_0", residual=16),
    "cache.codec=q8_0 cache.rotate=false": EngineQuantization("q8_0", rotate=False),
    "cache.codec=fp8_truncated": EngineQuantization("fp8_truncated"),
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


LLAMA = {"rotate": True, "neighbours": True}
BLOCKS = {  # words -> fields of the identity that are new, for a llama with 64 channels a head
    "cache.codec=q8_0": LLAMA,
    "cache.codec=q8_0 cache.rotate=true": LLAMA,
    "cache.codec=q4_0 cache.rotate=false": {"rotate": False, "neighbours": True},
    "cache.codec=q4_0 +model.config.head_dim=32": {"rotate": False, "neighbours": True},
    "cache.codec=q8_0 model.family=qwen2": {"rotate": True, "neighbours": False},
    "cache.codec=q8_0 bytes_ratio=0.3": LLAMA,
    "cache.codec=fp8": {},
    "cache.codec=u8 bytes_ratio=0.3": {},
}


@pytest.mark.parametrize("words", BLOCKS)
def test_runs_in_llama_cpps_formats_alone_are_known_anew(words):
    """By how their model's keys are stored; all others, and budgets of bytes, by what they were known by."""
    codec, *rest = words.split()
    head = [] if "head_dim" in words else ["+model.config.head_dim=64"]
    budget = [] if "bytes_ratio" in words else ["kv_ratio=0.5"]
    identity = settings_of(*composed("model=tiny", "task=news", "method=h2o", *budget, *head, codec, *rest)).identity
    old = {"codec": codec.partition("=")[2], "key_bits": None, "value_bits": None, "signs": False, "residual": 0}
    assert identity["quantization"] == old | BLOCKS[words]
    assert identity["budget"].get("quantization", old) == old


REFUSED = {
    "cache.codec=q5_0": r"cache\.codec must be",
    "cache.codec=fp8 cache.group=16": r"cache\.group has no effect with cache\.codec=fp8.*cache\.codec=kivi",
    "cache.codec=fp8 cache.bits=8": r"cache\.bits has no effect with cache\.codec=fp8",
    "cache.signs=true": r"cache\.signs has no effect with cache\.codec=kivi.*cache\.codec=turboquant",
    "cache.codec=fp8 cache.rotate=false": r"cache\.rotate has no effect with cache\.codec=fp8.*cache\.codec=q8_0",
    "cache.codec=turboquant cache.bits=2": r"cache\.bits must be",
    "cache.codec=turboquant cache.value_bits=8": r"values in 4 or 3, got cache\.key_bits=4 and cache\.value_bits=8",
    "cache.bits=3": r"cache\.bits must be",
    "cache.codec=[fp8]": r"cache\.codec must be a text, got \['fp8'\]",
    "cache.codec=[fp8] cache.rotate=true": r"cache\.rotate has no effect",
    "cache.codec=q8_0 method=quest": "keeps everything",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_means_nothing_is_refused(words):
    def made():
        check_idle(*composed(*RUN, *words.split()), words.split())
        return settings_of(*composed(*RUN, *words.split()))

    with pytest.raises(ConfigError, match=REFUSED[words]):
        made()
