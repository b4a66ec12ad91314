"""Which numbers of tokens and of bits fit into a share of bytes.

    python -m experiments.studies.bits_and_tokens model=testbed_rope bytes_ratio=0.5,0.25 cache.bits=16,8,4,2

The share is of the keys and values of a prompt's full cache at 16 bits per number. For each number of bits the command
prints how many slots a kv head gets, what share of the prompt's tokens that is, and what the slots take, with scales,
zeros and the window in full precision. Settings, several values with commas where marked:
  bytes_ratio=0.5,0.25,0.125   shares of bytes (several)
  prompt_tokens=1000           tokens of a prompt
  cache.bits=16,8,4,2          bits of keys and values (several)
  cache.key_bits, cache.value_bits   bits of one of the two alone (several)
  cache.residual, cache.group, cache.key_axis, cache.value_axis, cache.symmetric   as of kvexp run
  model=NAME, model.SETTING=VALUE    the model whose heads are counted
The last line is a sweep over the pairs, to be completed with methods and a task.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omegaconf import OmegaConf

from kvexp.core.quantized import SlotBytes
from kvexp.hf.traits import head_dim
from kvexp.run.build import CACHE_KEYS, keys_named, quantization_of
from kvexp.run.compose import hydra_errors_shown, split_model_words
from kvexp.run.jobs import composed_model
from kvexp.run.model_spec import config_of_spec
from kvexp.util.errors import CacheError, ConfigError
from kvexp.util.output import say, tells_errors, watch_pipes

STORAGE = ("residual", "group", "key_axis", "value_axis", "symmetric")  # of the group `cache`, one value each
DEFAULTS = {
    **{"bytes_ratio": "0.5,0.25,0.125", "prompt_tokens": "1000"},
    **{"cache.bits": "16,8,4,2", "cache.key_bits": "", "cache.value_bits": ""},
    **{f"cache.{name}": "" for name in STORAGE},
}


@dataclass(frozen=True)
class BitsAndTokens:
    """One possibility: slots of a kv head at key_bits and value_bits within a share of bytes.

    slots: 0 where not even one fits; prompt_share: slots over prompt tokens; bytes: of these slots, per kv head;
    allowed: bytes that the share is.
    """

    bytes_ratio: float
    key_bits: int
    value_bits: int
    slots: int
    prompt_share: float
    bytes: int
    allowed: int


def possibilities(
    shares: Sequence[float], bits: Sequence[tuple[int, int]], storage: Mapping[str, object], width: int, tokens: int
) -> list[BitsAndTokens]:
    """What fits into each share at each (key bits, value bits), for heads of `width` channels and a prompt of `tokens`.

    storage: as of the group `cache` (`STORAGE`); ConfigError as of `Quantization`.
    """
    fitting = []
    for share, (key_bits, value_bits) in itertools.product(shares, bits):
        how = quantization_of({**storage, "key_bits": key_bits, "value_bits": value_bits})
        if how is not None:
            with keys_named(CACHE_KEYS):
                how.check_head(width, width)
        counted, allowed = SlotBytes(width, width, how), share * SlotBytes(width, width).of(tokens)
        slots = counted.most_slots(allowed + 1e-9)
        numbers = (slots, slots / tokens, counted.of(slots) if slots else 0, int(allowed))
        fitting.append(BitsAndTokens(share, key_bits, value_bits, *numbers))
    return fitting


@tells_errors(ConfigError, CacheError)
def main(words: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 after printing an error."""
    watch_pipes()
    words = sys.argv[1:] if words is None else words
    if words[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    model_words, values = split_model_words(words, DEFAULTS, "the settings are")
    with hydra_errors_shown(model_words):
        name, spec = composed_model(model_words)
        width = head_dim(config_of_spec(spec))
    shares = [number(text, "bytes_ratio") for text in values["bytes_ratio"].split(",")]
    tokens = int(number(values["prompt_tokens"], "prompt_tokens"))
    given = [f"cache.{name}={values[f'cache.{name}']}" for name in STORAGE if values[f"cache.{name}"]]
    storage = OmegaConf.to_container(OmegaConf.from_dotlist(given)).get("cache", {})  # type: ignore[union-attr]
    fitting = possibilities(shares, pairs_of(values), storage, width, tokens)
    show(name, width, tokens, fitting, [*given, *model_words])
    return 0


def pairs_of(words: Mapping[str, str]) -> list[tuple[int, int]]:
    """(key bits, value bits): the same for both, unless bits of one of them are given."""
    both, keys, values = (
        [int(number(word, key)) for word in words[key].split(",") if word]
        for key in ("cache.bits", "cache.key_bits", "cache.value_bits")
    )
    return list(itertools.product(keys or both, values or both)) if keys or values else [(bits, bits) for bits in both]


def number(text: str, key: str) -> float:
    """A positive number; bytes_ratio is at most 1, all others are whole."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if key == "bytes_ratio" and not 0 < value <= 1:
        raise ConfigError(f"bytes_ratio must be in (0, 1], got {text!r}")
    if key != "bytes_ratio" and (value < 1 or value != int(value)):
        raise ConfigError(f"{key} must be a whole number of at least 1, got {text!r}")
    return value


def show(name: str, width: int, tokens: int, fitting: Sequence[BitsAndTokens], more: Sequence[str]) -> None:
    """Print the possibilities and a sweep over those that hold at least one slot; more: its other words."""
    say(f"{name}: heads of {width} channels, prompts of {tokens} tokens; bytes of one kv head")
    say("bytes_ratio  key_bits  value_bits    slots  of prompt      bytes    allowed")
    for fit in fitting:
        slots, share = (f"{fit.slots}", f"{100 * fit.prompt_share:.1f} %") if fit.slots else ("none", "-")
        say(
            f"{fit.bytes_ratio:>11g}  {fit.key_bits:>8}  {fit.value_bits:>10}  {slots:>7}  {share:>9}  {fit.bytes:>9}  "
            f"{fit.allowed:>9}"
        )
    fits = [choice for choice in fitting if choice.slots]
    if fits:
        apart = any(choice.key_bits != choice.value_bits for choice in fits)
        keys = {"bytes_ratio": "bytes_ratio", "key_bits": "cache.key_bits" if apart else "cache.bits"}
        keys |= {"value_bits": "cache.value_bits"} if apart else {}
        values = {key: dict.fromkeys(f"{getattr(choice, name):g}" for choice in fits) for name, key in keys.items()}
        say(" ".join(["kvexp run -m", *(f"{key}={','.join(listed)}" for key, listed in values.items()), *more]))


if __name__ == "__main__":
    sys.exit(main())
