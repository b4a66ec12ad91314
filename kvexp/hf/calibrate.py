"""Statistics of a model and how they are kept: of its queries and heads, from one pass; a surrogate of KVzip+'s scores.

For a surrogate the model reads prompts twice, and linear maps are fitted to what was seen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvexp.core import Budget, CacheConfig, EvictionContext, Method
from kvexp.core.statistics import CalibrationLayer, HeadScores, QueryCalibration, Surrogate
from kvexp.hf.cache import EvictionCache
from kvexp.hf.layers import compose
from kvexp.hf.moving_rope import MovingRope, check_turns
from kvexp.hf.patch import attention_modules, check_patched, forget_layer_input, layer_input
from kvexp.hf.probe import layer_ropes
from kvexp.hf.traits import CACHE_ARGUMENT, num_layers, query_shape
from kvexp.util.errors import ConfigError
from kvexp.util.files import cache_folder, locked, replace

ABOUT = "kvexp"  # the one entry of the file's metadata: safetensors writes several in any order
Made = TypeVar("Made", QueryCalibration, HeadScores, Surrogate)


@dataclass(frozen=True)
class StatisticsFile(Generic[Made]):
    """The files that hold one kind of statistics of models: in the cache folder, a model's known by its digest.

    what: name of the kind in messages; place: its folder and the beginning of its files' names; version: raised by a
    change after which the same model and texts would give others; tensors: attributes that `make` takes, in order.
    """

    what: str
    place: tuple[str, str]
    version: int
    tensors: tuple[str, ...]
    make: Callable[..., Made]

    def path(self, model: str) -> Path:
        """Place of a model's statistics, whether there are any or not. model: what stands for its weights."""
        folder, name = self.place
        digest = hashlib.sha256(model.encode()).hexdigest()[:32]
        return cache_folder() / folder / f"{name}{self.version}-{digest}.safetensors"

    def write(self, made: Made, model: str, about: Mapping[str, Any]) -> Path:
        """Write a model's statistics to its file, whole or not at all, in place of older ones; returns the file.

        about: what they were made of, for readers. ConfigError where the file cannot be written.
        """
        notes = {"version": self.version, "model": model, "digest": made.digest, "about": dict(about)}
        tensors = {name: getattr(made, name).contiguous() for name in self.tensors}
        file = self.path(model)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with locked(file.parent):
                replace(file, save(tensors, {ABOUT: json.dumps(notes)}))
        except OSError as error:
            raise ConfigError(
                f"cannot write {file} ({error.strerror or error}): make room, or set KVEXP_CACHE to a folder that can "
                "be written"
            ) from error
        return file

    def read(self, model: str) -> Made | None:
        """A model's statistics; None where it has none. ConfigError for a file that is not what was written for it."""
        stored = self._read(model)
        return None if stored is None else stored[0]

    def about(self, model: str) -> Mapping[str, Any]:
        """What a model's statistics were made of, as it was written; empty where it has none. ConfigError as `read`."""
        stored = self._read(model)
        return {} if stored is None else stored[1]

    def _read(self, model: str) -> tuple[Made, Mapping[str, Any]] | None:
        file = self.path(model)
        try:
            with safe_open(file, "pt") as opened:
                notes = json.loads((opened.metadata() or {})[ABOUT])
                statistics = self.make(*(opened.get_tensor(name) for name in self.tensors))
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, ValueError, KeyError, ConfigError) as error:
            raise ConfigError(f"{file} is no {self.what} ({error})") from error
        if (notes.get("version"), notes.get("model"), notes.get("digest")) != (self.version, model, statistics.digest):
            raise ConfigError(f"{file} was written for another model, by another version, or changed since")
        return statistics, notes["about"]


QUERIES = StatisticsFile(
    "calibration", ("calibration", "queries"), 1, ("direction", "mean", "size"), QueryCalibration.of
)
HEADS = StatisticsFile("calibration", ("calibration", "heads"), 1, ("scores",), HeadScores.of)
SURROGATES = StatisticsFile("surrogate", ("surrogate", "kvzap"), 1, ("weight", "bias"), Surrogate.of)


def calibrate_queries(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], done: Callable[[], None] = lambda: None
) -> QueryCalibration:
    """Statistics of the queries that a patched model makes of these token ids, for `CacheConfig(calibration=...)`.

    sequences: each is read by itself from position 0, at full attention. done: called after each. ConfigError for no
    token, and for RoPE whose frequencies change with length.
    """
    return calibrate_queries_and_heads(model, sequences, done)[0]


def calibrate_heads(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], done: Callable[[], None] = lambda: None
) -> HeadScores:
    """Scores of a patched model's kv heads on these token ids, for `CacheConfig(head_scores=...)` (`budget.heads=duo`).

    Arguments and errors as of `calibrate_queries`; ConfigError also for models without RoPE.
    """
    scores = calibrate_queries_and_heads(model, sequences, done)[1]
    if scores is None:
        raise ConfigError(
            f"scores of heads compare their mean query and key under RoPE, which a {model.config.model_type} "
            "model does not have: take another budget.heads"
        )
    return scores


@torch.no_grad()
def calibrate_queries_and_heads(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], done: Callable[[], None] = lambda: None
) -> tuple[QueryCalibration, HeadScores | None]:
    """`calibrate_queries` and `calibrate_heads` in one pass; no scores of heads for models without RoPE."""
    check_patched(model.config, ConfigError)
    if not sequences or not all(sequences):
        raise ConfigError("a calibration pass needs at least one sequence, and a token in each")
    check_turns(MovingRope.of(model.config), "a calibration pass")
    query_shape(model.config)
    ropes = layer_ropes(model)
    states = [CalibrationLayer() for _ in range(num_layers(model.config))]
    device = model.get_input_embeddings().weight.device
    for ids in sequences:
        cache = Cache(layers=compose(model.config, states, ropes=ropes))
        model(torch.tensor([list(ids)], device=device), use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
        for state in states:
            state.reset()
        done()
    parts = zip(*(state.sums.statistics() for state in states), strict=True)
    scores = [score for state in states if (score := state.head_scores.mean()) is not None]
    heads = HeadScores.of(torch.stack(scores)) if len(scores) == len(states) else None
    return QueryCalibration.of(*(torch.stack(tensors) for tensors in parts)), heads


LEAST = 1e-10  # score whose logarithm is taken: a value of 0 has none
RIDGE = 1.0  # is added to the diagonal of X^T X, as in kvpress's training


@dataclass(frozen=True)
class FittedSurrogate:
    """A surrogate, how well it predicts prompts that were held out, and how many tokens were seen.

    r2 [L]: the share of variance that it explains of them, mean over kv heads; None: nothing was held out.
    """

    surrogate: Surrogate
    r2: list[float] | None
    fitted_tokens: int
    held_out_tokens: int


@dataclass
class LayerMoments:
    """Sums over tokens of one layer, of which the least squares of y = x w + b follow; float64.

    x: inputs [N, n], y: targets [N, H].
    """

    count: int = 0
    x: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    y: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    xx: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    xy: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add tokens: x [N, n], y [N, H]."""
        x, y = x.double().cpu(), y.double().cpu()
        self.count += len(x)
        self.x, self.y = self.x + x.sum(0), self.y + y.sum(0)
        self.xx, self.xy = self.xx + x.T @ x, self.xy + x.T @ y

    def solve(self) -> tuple[Tensor, Tensor]:
        """w [H, n] and b [H], float32: ridge regression around the means."""
        mean_x, mean_y = self.x / self.count, self.y / self.count
        xx = self.xx - self.count * mean_x[:, None] * mean_x + RIDGE * torch.eye(len(mean_x), dtype=torch.float64)
        weight = torch.linalg.solve(xx, self.xy - self.count * mean_x[:, None] * mean_y)
        return weight.T.float().contiguous(), (mean_y - mean_x @ weight).float()


@torch.no_grad()
def train_surrogate(
    model: PreTrainedModel,
    method: Method,
    prompts: Sequence[Sequence[int]],
    held_out: Sequence[Sequence[int]],
    tokenizer: Any,
    done: Callable[[], None] = lambda: None,
) -> FittedSurrogate:
    """Fit a layer's inputs to the logarithm of what `method` (KVzip+) scores after its second pass over each prompt.

    prompts, held_out: token ids; of the second r2 is measured and nothing is fitted. done: called after each prompt.
    ConfigError for prompts that hold nothing to learn from.
    """
    moments: list[LayerMoments] = []
    for ids in prompts:
        for index, (x, y) in enumerate(_seen(model, method, ids, tokenizer)):
            if index == len(moments):
                moments.append(LayerMoments())
            moments[index].add(x, y)
        done()
    if not moments or moments[0].count < 2:
        raise ConfigError("a surrogate needs prompts of more tokens than the method's sinks")
    solved = [layer.solve() for layer in moments]
    surrogate = Surrogate.of(torch.stack([w for w, _ in solved]), torch.stack([b for _, b in solved]))
    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in moments]
    for ids in held_out:
        for index, (x, y) in enumerate(_seen(model, method, ids, tokenizer)):
            parts[index].append((surrogate.layer(index).scores(x[None])[0].T.double().cpu(), y.double().cpu()))
        done()
    tested = sum(len(y) for _, y in parts[0])
    r2 = [_r2(torch.cat([p for p, _ in seen]), torch.cat([y for _, y in seen])) for seen in parts] if tested else None
    return FittedSurrogate(surrogate, r2, moments[0].count, tested)


def _seen(model: PreTrainedModel, method: Method, ids: Sequence[int], tokenizer: Any) -> list[tuple[Tensor, Tensor]]:
    """By layer: inputs [N, n] and log scores [N, H] of a prompt's tokens behind the sinks."""
    inputs: list[Tensor] = []
    scores: list[Tensor] = []
    if len(ids) <= method.sinks + 1:
        return []

    class Noting(type(method)):  # type: ignore[misc]
        """The method; records its scores."""

        def priority(self, ctx: EvictionContext) -> Tensor:
            priority: Tensor = super().priority(ctx)
            scores.append(priority[0])
            return priority

    noting = Noting(**{field.name: getattr(method, field.name) for field in fields(method)})
    most = max(1, len(ids) - 1)
    cache = EvictionCache(model, CacheConfig(noting, Budget(tokens=most, counts_self=False)), tokenizer=tokenizer)
    holder = layer_input(model)
    count = len(cache.layer_states)

    def note(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        hidden = holder.take()
        if hidden is not None and len(inputs) < count:  # the second pass comes after the prompt's own forward
            inputs.append(hidden[0])

    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in attention_modules(model)]
    try:
        device = model.get_input_embeddings().weight.device
        model(torch.tensor([list(ids)], device=device), use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
    finally:
        for hook in hooks:
            hook.remove()
        forget_layer_input(model)
    sinks = method.sinks
    return [(x[sinks:], y[:, sinks:].T.clamp_min(LEAST).log()) for x, y in zip(inputs, scores, strict=True)]


def _r2(predicted: Tensor, truth: Tensor) -> float:
    """Mean over columns of 1 - residual / total variance; both [N, H]."""
    residual, total = ((truth - predicted) ** 2).sum(0), ((truth - truth.mean(0)) ** 2).sum(0)
    return float((1 - residual / total.clamp_min(torch.finfo(torch.float64).tiny)).mean())
