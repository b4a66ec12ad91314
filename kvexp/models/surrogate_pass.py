"""Training a surrogate of KVzip+'s scores: a model reads prompts twice, and linear maps are fitted to what was seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvexp.core import Budget, CacheConfig, EvictionContext, Method
from kvexp.core.surrogate import Surrogate
from kvexp.errors import ConfigError
from kvexp.models.cache import EvictionCache
from kvexp.models.layer_input import forget_layer_input, layer_input

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
    solved = [each.solve() for each in moments]
    surrogate = Surrogate.of(torch.stack([w for w, _ in solved]), torch.stack([b for _, b in solved]))
    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in moments]
    for ids in held_out:
        for index, (x, y) in enumerate(_seen(model, method, ids, tokenizer)):
            parts[index].append((surrogate.layer(index).scores(x[None])[0].T.double().cpu(), y.double().cpu()))
        done()
    tested = sum(len(y) for _, y in parts[0])
    r2 = [_r2(torch.cat([p for p, _ in part]), torch.cat([y for _, y in part])) for part in parts] if tested else None
    return FittedSurrogate(surrogate, r2, moments[0].count, tested)


def _seen(model: PreTrainedModel, method: Method, ids: Sequence[int], tokenizer: Any) -> list[tuple[Tensor, Tensor]]:
    """By layer: inputs [N, n] and log scores [N, H] of a prompt's tokens behind the sinks."""
    inputs: list[Tensor] = []
    scores: list[Tensor] = []
    if len(ids) <= method.sinks + 1:
        return []

    class Noting(type(method)):  # type: ignore[misc]
        """The method, whose scores are put down."""

        def priority(self, ctx: EvictionContext) -> Tensor:
            made: Tensor = super().priority(ctx)
            scores.append(made[0])
            return made

    noting = Noting(**{one.name: getattr(method, one.name) for one in fields(method)})
    most = max(1, len(ids) - 1)
    cache = EvictionCache(model, CacheConfig(noting, Budget(tokens=most, counts_self=False)), tokenizer=tokenizer)
    holder = layer_input(model)
    count = len(cache.layer_states)

    def note(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        hidden = holder.take()
        if hidden is not None and len(inputs) < count:  # the second pass comes after the prompt's own forward
            inputs.append(hidden[0])

    attentions = [module for module in model.modules() if type(module).__name__.endswith("Attention")]
    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in attentions]
    try:
        device = model.get_input_embeddings().weight.device
        model(torch.tensor([list(ids)], device=device), past_key_values=cache, use_cache=True, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
        forget_layer_input(model)
    pairs = []
    for x, y in zip(inputs, scores, strict=True):
        behind = slice(method.sinks, None)
        pairs.append((x[behind], y[:, behind].T.clamp_min(LEAST).log()))
    return pairs


def _r2(predicted: Tensor, truth: Tensor) -> float:
    """Mean over columns of 1 - residual / total variance; both [N, H]."""
    residual, total = ((truth - predicted) ** 2).sum(0), ((truth - truth.mean(0)) ** 2).sum(0)
    return float((1 - residual / total.clamp_min(torch.finfo(torch.float64).tiny)).mean())
