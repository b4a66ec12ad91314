"""Terms of a gate by its command line, its prompts, and the verdict on how many are beyond the limits. No torch.

A prompt is within if it is within every limit that was given. The verdict is about new prompts of the same kind, of
which a share is to stay within: pass and fail are one exact binomial test each (`kvexp.results.promise`), at the number
of prompts that was planned. A gate ends early where the rest cannot change that it fails: the test is then the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Any, Literal

from kvexp.gate.sides import Prompt
from kvexp.results import advise, promise
from kvexp.results.advise import ROUNDING
from kvexp.run.store import EPSILON_KL
from kvexp.tasks.data import json_rows
from kvexp.util.errors import ConfigError, did_you_mean
from kvexp.util.fields import AtLeast, Range, typed_words
from kvexp.util.files import path_of
from kvexp.util.strict_json import Json

EXIT = {"pass": 0, "fail": 1, "undecided": 3}  # 2 is a wrong command, as everywhere
MOST_NEEDED = 5000  # prompts; of more it is not said how many would decide
Verdict = Literal["pass", "fail", "undecided"]
State = Literal["within", "beyond", "not known", "left out"]

WORDS: dict[str, tuple[Any, str]] = {
    "baseline": (str, "the reference: a server's URL, llama_cpp:FILE.gguf or transformers:FOLDER"),
    "candidate": (str, "what is judged by it: the same, with settings as in llama_cpp:FILE.gguf?cache_k=q4_0"),
    "data": (str, 'a file of prompts, one {"prompt": TEXT} or {"messages": [...]} a line'),
    "kl": (Annotated[float, Range(0, above=True)], "nats per token that a prompt may lose (0.05 without any limit)"),
    "top1": (Annotated[float, Range(0, 1, above=True)], "share of tokens whose likeliest token stays the same"),
    "length": (Annotated[float, Range(0)], "by which share of its length an answer may be longer or shorter"),
    "valid": (Literal["json"], "json: an answer must be JSON where the baseline's is"),
    "share": (advise.OWN_WORDS["share"][0], "of new prompts that are to stay within all of these (0.90)"),
    "confidence": (advise.OWN_WORDS["confidence"][0], "of a pass, and of a fail (0.95)"),
    "places": (Annotated[int, AtLeast(1)], "tokens of the baseline's answer at which distributions are compared (16)"),
    "max_tokens": (Annotated[int, AtLeast(1)], "of an answer (64)"),
    "top": (str, "log-probabilities asked for at a place: all (default), or the likeliest K, which is faster"),
    "limit": (Annotated[int, AtLeast(1)], "take the first prompts alone"),
    "timeout": (Annotated[float, Range(0, above=True)], "seconds that a reply may take (300)"),
    "outputs_dir": (str, "where rows are kept (outputs/gate)"),
}


@dataclass(frozen=True)
class Terms:
    """What is compared, by which limits, and the share of new prompts that is to stay within them."""

    baseline: str
    candidate: str
    data: str
    kl: float | None = None
    top1: float | None = None
    length: float | None = None
    valid: str | None = None
    share: float = 0.9
    confidence: float = 0.95
    places: int = 16
    max_tokens: int = 64
    top: int | None = None
    limit: int | None = None
    timeout: float = 300.0
    outputs_dir: str = "outputs/gate"

    @classmethod
    def of(cls, words: Sequence[str]) -> Terms:
        """Read KEY=VALUE words; ConfigError names the key and what is allowed."""
        values, rest = typed_words(words, WORDS)
        if rest:
            key = rest[0].partition("=")[0]
            known = did_you_mean(key, WORDS) or f"; there are {', '.join(WORDS)}"
            raise ConfigError(f"gate takes KEY=VALUE, got {rest[0]}{known}")
        if lacking := [name for name in ("baseline", "candidate", "data") if not values.get(name)]:
            raise ConfigError(f"gate needs {lacking[0]}=, {WORDS[lacking[0]][1]}")
        top = values.pop("top", "all")
        if top != "all" and not (top.isdecimal() and int(top) > 0):
            raise ConfigError(f"top must be all or a whole number from 1 on, got {top!r}")
        if not {"kl", "top1", "length", "valid"} & set(values):
            values["kl"] = EPSILON_KL
        terms = cls(**values, top=None if top == "all" else int(top))
        if terms.places > terms.max_tokens:
            raise ConfigError(f"places={terms.places} is more than an answer may have: max_tokens={terms.max_tokens}")
        return terms

    @property
    def error(self) -> float:
        return 1 - self.confidence

    @property
    def limits(self) -> str:
        """The limits as text, to follow "a new prompt stays"."""
        texts = {
            "kl": "within {:g} nats per token of the baseline",
            "top1": "with the baseline's likeliest token at {:g} or more of the places",
            "length": "within {:.0%} of the baseline's length",
            "valid": "valid {}",
        }
        return " and ".join(
            text.format(getattr(self, key)) for key, text in texts.items() if getattr(self, key) is not None
        )

    def state(self, row: Mapping[str, Any]) -> State:
        """State of a prompt. not known: its KL is a lower bound; left out: the baseline itself is not valid."""
        ours, theirs = row["baseline"], row["candidate"]
        if self.valid and not ours["valid"]:
            return "left out"
        longer = abs(theirs["new_tokens"] / ours["new_tokens"] - 1)
        if (
            (self.kl is not None and row["kl"] > self.kl + ROUNDING)
            or (self.top1 is not None and row["top1"] < self.top1 - ROUNDING)
            or (self.length is not None and longer > self.length + ROUNDING)
            or (self.valid and not theirs["valid"])
        ):
            return "beyond"
        return "not known" if self.kl is not None and row["lower_bound"] else "within"

    def fails_from(self, n: int) -> int | None:
        """The fewest of n prompts whose being beyond the limits refutes the share; None: not even all of them do."""
        return next((k for k in range(n + 1) if promise.share_p_value(n - k, n, 1 - self.share) <= self.error), None)

    def passes_to(self, n: int) -> int:
        """The most of n prompts that may be beyond the limits for a pass; -1: not even none."""
        return promise.most_beyond(n, self.share, self.error)


@dataclass(frozen=True)
class Judgement:
    """The verdict on n prompts: `beyond` of them are beyond the limits, and of `unknown` that cannot be known."""

    terms: Terms = field(repr=False)
    n: int
    beyond: int
    unknown: int

    @classmethod
    def of(cls, terms: Terms, rows: Sequence[Mapping[str, Any]]) -> Judgement:
        states = [terms.state(row) for row in rows]
        return cls(terms, len(rows) - states.count("left out"), states.count("beyond"), states.count("not known"))

    def ends(self, planned: int) -> bool:
        """Whether the rest of the planned prompts cannot change that it fails."""
        least = self.terms.fails_from(planned)
        return least is not None and self.beyond >= least

    @property
    def verdict(self) -> Verdict:
        least = self.terms.fails_from(self.n)
        if least is not None and self.beyond >= least:
            return "fail"
        return "pass" if self.beyond + self.unknown <= self.terms.passes_to(self.n) else "undecided"

    @property
    def bounds(self) -> tuple[float, float]:
        """Bounds on the share of new prompts that stay within, each at the confidence of the terms."""
        error, n = self.terms.error, self.n
        low = promise.share_bound(self.beyond + self.unknown, n, error) if n else 0.0
        return low, 1 - promise.share_bound(n - self.beyond, n, error) if n else 1.0

    @property
    def needed(self) -> int | None:
        """Prompts that would decide at the rate seen so far; None: no number up to MOST_NEEDED would."""
        rate = self.beyond / self.n if self.n else 0.0
        n = self.n
        while (n := n + max(1, n // 50)) <= MOST_NEEDED:
            least = self.terms.fails_from(n) if rate > 1 - self.terms.share else None
            passes = not self.unknown and self.terms.passes_to(n) >= math.ceil(rate * n - ROUNDING)
            if passes or (least is not None and math.floor(rate * n + ROUNDING) >= least):
                return n
        return None


def is_json(text: str) -> bool:
    """Whether an answer is JSON and nothing else."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def prompts_of(terms: Terms) -> list[Prompt]:
    """The prompts of `data`; ConfigError names the row that holds none."""
    path = path_of(terms.data, "data")
    rows = enumerate(islice(json_rows(path, "data"), terms.limit), 1)
    if prompts := [_prompt(row, f"data: row {place} of {path}", str(row.get("id", place))) for place, row in rows]:
        return prompts
    raise ConfigError(f"data: {path} holds no prompt; name a file with at least one row")


def _prompt(row: Json, where: str, name: str) -> Prompt:
    text, messages = row.get("prompt"), row.get("messages")
    if isinstance(text, str) and text and messages is None:
        return Prompt(name, text)
    turns = messages if text is None and isinstance(messages, list) else []
    if turns and all(isinstance(a, dict) and "content" in a and isinstance(a.get("role"), str) for a in turns):
        return Prompt(name, messages=tuple(turns))
    raise ConfigError(
        f'{where} holds no prompt: give {{"prompt": TEXT}}, or {{"messages": [{{"role": "user", "content": TEXT}}]}}'
    )
