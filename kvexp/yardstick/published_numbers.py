"""Published numbers of models at full cache, with their sources: published.yaml as objects."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from kvexp.errors import ConfigError

FILE = Path(__file__).with_name("published.yaml")


@dataclass(frozen=True)
class PublishedNumber:
    """A benchmark of lm-eval, the metric that was printed, and its number in percent."""

    task: str
    metric: str
    number: float


@dataclass(frozen=True)
class PublishedModel:
    """What was published of a model; protocol, weights, source and beside are texts for people."""

    name: str
    protocol: str
    weights: str
    source: str
    numbers: tuple[PublishedNumber, ...]
    beside: tuple[str, ...]


def published(name: str) -> PublishedModel:
    """Of the model configuration of this name; ConfigError where nothing is known."""
    known: Any = OmegaConf.to_container(OmegaConf.load(FILE))
    if name not in known:
        raise ConfigError(
            f"no published number is known for model={name}; there are numbers for {', '.join(map(str, known))} (add "
            "others, with their source, to kvexp/yardstick/published.yaml; of a local copy say --numbers NAME)"
        )
    node = known[name]
    numbers = tuple(PublishedNumber(task, **each) for task, each in node["numbers"].items())
    protocol, weights, source = (" ".join(node[key].split()) for key in ("protocol", "weights", "source"))
    return PublishedModel(name, protocol, weights, source, numbers, tuple(node.get("beside", ())))
