"""How a log-likelihood is measured when the cache shrinks: two protocols, and the papers' settings of them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from kvexp.errors import ConfigError

MODES = ("prefill_then_step", "row_mask")
MASKS = ("local", "global")
LENGTHS = ("own", "padded")
DTYPES = ("float32", "float16")
ONLY_MASKED = ("mask", "budget_length", "whole_text", "score_dtype")

# What the papers' lm-eval scripts do differently from lm-eval today and from each other.
# a2sf: arXiv:2407.20485, release of 2024 over lm-eval 0.4.0, fp16, batches of 2 padded on the right.
# h2o, keyformer: arXiv:2306.14048 and arXiv:2403.09054, whose scripts feed the whole text, last token included, and
# hand the mean log-probability per token to the scorer. H2O's LLaMA script has since 2024 the global mask.
PAPERS: dict[str, dict[str, Any]] = {
    "a2sf": {
        "add_bos": False,
        "fewshot_split": "validation",
        "fewshot_excludes_item": False,
        "budget_length": "padded",
        "padded_batch": 2,
        "score_dtype": "float16",
    },
    "h2o": {"add_bos": False, "whole_text": True, "per_token": True},
    "keyformer": {"add_bos": False, "whole_text": True, "per_token": True},
}
PROTOCOLS = (*MODES, *PAPERS)


@dataclass(frozen=True)
class Protocol:
    """mode prefill_then_step: prefill the context, evict, feed the continuation token by token. The budget comes from
    the context alone. The first token is judged by the full prefill, so answers of one token never feel eviction.

    mode row_mask: one forward over context and continuation under a mask per row (kvexp.core.row_mask); nothing is
    dropped. mask: local is causal, global sees future queries (H2O's LLaMA script). budget_length: tokens that
    ratios are of, the request's own or those of its batch of `padded_batch` requests, longest first. whole_text: feed
    the last token too, whose output nobody reads but which counts for the budget. score_dtype: of the accumulated
    scores.

    Both: add_bos: put a start token in front (None: as the tokenizer does). per_token: score a continuation by its mean
    log-probability per token instead of the sum. fewshot_split: where examples come from (None: as the task says);
    fewshot_excludes_item: an item is never an example of itself.
    """

    mode: Literal["prefill_then_step", "row_mask"] = "prefill_then_step"
    mask: Literal["local", "global"] = "local"
    budget_length: Literal["own", "padded"] = "own"
    padded_batch: int = 2
    whole_text: bool = False
    score_dtype: Literal["float32", "float16"] = "float32"
    add_bos: bool | None = None
    per_token: bool = False
    fewshot_split: str | None = None
    fewshot_excludes_item: bool = True

    def __post_init__(self) -> None:
        for name, allowed in (
            ("mode", MODES),
            ("mask", MASKS),
            ("budget_length", LENGTHS),
            ("score_dtype", DTYPES),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.padded_batch < 1:
            raise ConfigError(f"padded_batch must be at least 1 request, got {self.padded_batch}")
        if self.mode == "prefill_then_step":
            for field in fields(self):
                if field.name in ONLY_MASKED and getattr(self, field.name) != field.default:
                    raise ConfigError(
                        f"{field.name}={getattr(self, field.name)} belongs to protocol=row_mask; leave it out"
                    )


def protocol_of(name: str, **switches: Any) -> Protocol:
    """The protocol of this name, a mode or a paper, with the switches that are not None in place of its own."""
    if name not in PROTOCOLS:
        raise ConfigError(f"protocol must be one of {', '.join(PROTOCOLS)}, got {name!r}")
    known = {field.name for field in fields(Protocol)}
    wrong = set(switches) - known
    if wrong:
        raise ConfigError(f"{sorted(wrong)[0]} is not a setting of a protocol; it has: {', '.join(sorted(known))}")
    mode = name if name in MODES else "row_mask"
    own = PAPERS.get(name, {})
    return Protocol(**{"mode": mode, **own, **{k: v for k, v in switches.items() if v is not None}})
