"""The same items through lm-eval's own Hugging Face model: log-likelihood by log-likelihood, and in accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvexp.config.settings import Settings
from kvexp.errors import ConfigError
from kvexp.tasks.lm_eval import LMEval

WITHIN = 1e-3  # nats, per log-likelihood


@dataclass(frozen=True)
class HFLMAgreement:
    """requests: log-likelihoods compared; largest: their largest difference in nats; other: items scored otherwise."""

    task: str
    items: int
    requests: int
    largest: float
    other: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        return self.largest <= WITHIN and not self.other


def agreement(settings: Settings, rows: Sequence[Mapping[str, Any]], lm: Any) -> HFLMAgreement:
    """Rows of a full cache against what lm-eval's model `lm` says of the same items of the settings' task."""
    task = settings.task
    assert isinstance(task, LMEval)
    known = {row["example"]: row for row in rows}
    items = [item for item in task.examples() if item.id in known]
    said = iter(lm.loglikelihood([instance for item in items for instance in item.instances], disable_tqdm=True))
    largest, other, requests = 0.0, [], 0
    for item in items:
        results = [next(said) for _ in item.instances]
        ours = known[item.id]
        pairs = list(zip(ours["choices"]["logprobs"], results, strict=True))
        largest = max([largest, *(abs(mine - theirs) for mine, (theirs, _) in pairs)])
        requests += len(pairs)
        if task.score_item(item, results) != ours["metrics"]:
            other.append(item.id)
    return HFLMAgreement(task.label(""), len(items), requests, largest, tuple(other))


def stock_model(settings: Settings) -> Any:
    """lm-eval's own model of the same files, which kvexp has no hand in."""
    from lm_eval.models.huggingface import HFLM

    from kvexp.tasks.lm_eval.package import quiet

    spec = settings.model
    if spec.kind == "random":
        raise ConfigError("--check-lm-eval needs a model with files: lm-eval loads it by itself")
    options: dict[str, Any] = {"trust_remote_code": spec.trust_remote_code, "revision": spec.revision or "main"}
    with quiet():
        return HFLM(
            pretrained=spec.path,
            tokenizer=spec.tokenizer,
            dtype=spec.dtype,
            device=spec.resolved_device(),
            batch_size=settings.batch_size,
            **options,
        )
