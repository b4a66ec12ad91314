"""What is compared, by name: "hf", "hf_packed", "hf_static", "full", "METHOD@KV_RATIO", "short@KV_RATIO"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

THEIRS = ("hf", "hf_packed", "hf_static")


@dataclass(frozen=True)
class Variant:
    """hf: Hugging Face's own cache; hf_packed: the same with kvexp's linear layers; hf_static: preallocated.

    kvexp's else: a method, and the share of the prompt it may keep (None: all). short: full attention over a prompt of
    the budget's length: the same slots, and no bookkeeping.
    """

    name: str
    kind: str
    kv_ratio: float | None = None

    @property
    def theirs(self) -> bool:
        return self.kind in THEIRS

    @property
    def model(self) -> str:
        """Which of the models with the same weights it runs on: hf, hf_packed or kvexp."""
        return ("hf_packed" if self.kind == "hf_packed" else "hf") if self.theirs else "kvexp"

    @property
    def grows(self) -> bool:
        """Whether the bytes on the device grow with every token: nothing is dropped."""
        return self.theirs or self.kind in ("full", "short", "sparq", "infllm", "pqcache", "quest")

    def prompt_tokens(self, prompt: int) -> int:
        return self.kept(prompt) if self.kind == "short" else prompt

    def slots(self, prompt: int, new: float) -> float:
        """Slots a decode step reads on average: what is kept, or everything and half of the new tokens."""
        if self.kv_ratio is not None and self.kind != "short":
            return self.kept(prompt)
        return self.prompt_tokens(prompt) + new / 2

    def plan(self, prompt: int) -> tuple[Any, Any]:
        """kvexp's method, and its budget of a prompt of so many tokens."""
        from kvexp.core import Budget

        keeps_all = self.kind in ("full", "short")
        return _method(self.kind), None if keeps_all else Budget(tokens=self.kept(prompt))

    def kept(self, prompt: int) -> int:
        """The budget: the share of the prompt, floored as kvexp does."""
        return int((self.kv_ratio or 1) * prompt + 1e-9)


def variant(name: str) -> Variant:
    """Read a name; ValueError says what is allowed."""
    kind, _, share = name.partition("@")
    if (kind in (*THEIRS, "full")) != (not share):
        raise ValueError(f"{name!r}: {', '.join(THEIRS)} and full take no kv_ratio, all else does, as in h2o@0.2")
    if kind not in THEIRS:
        _method(kind)
    return Variant(name, kind, float(share) if share else None)


def _method(kind: str) -> Any:
    from kvexp import methods, retrieval

    made = {
        "full": methods.Full,
        "short": methods.Full,
        "h2o": methods.H2O,
        "keyformer": methods.Keyformer,
        "keyformer_quiet": lambda: methods.Keyformer(noise="none"),
        "a2sf": methods.A2SF,
        "streaming_llm": methods.StreamingLLM,
        "snapkv": methods.SnapKV,
        "window": methods.Window,
        "tova": methods.TOVA,
        "sparq": lambda: retrieval.SparQ(n_sinks=32),
        "infllm": lambda: retrieval.InfLLM(n_sinks=32),
        "pqcache": lambda: retrieval.PQCache(n_sinks=32),
    }
    if kind not in made:
        raise ValueError(f"{kind!r} is not measured; allowed: {', '.join(THEIRS)}, {', '.join(made)}")
    return made[kind]()
