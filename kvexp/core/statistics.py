"""Statistics of queries and scores of heads that methods and budgets need."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs, AttentionParams, RoPE, compute_attention
from kvexp.core.sequence import SequenceState
from kvexp.util.errors import CacheError, ConfigError


class LastQueries:
    """The last `number` queries of each row, of the prompt or decoded, as the model rotated them.

    query [B, H, G, n, D] with n <= number, newest last; positions [B, n]: their position ids, -1 for padding.
    """

    def __init__(self, number: int, first: AttentionInputs) -> None:
        """No query yet; first: the inputs of the prompt's first forward, for shapes."""
        self.number = number
        self.query, self.positions = first.query[..., :0, :], first.query_positions[:, :0]

    def add(self, inputs: AttentionInputs) -> None:
        """Add the queries of one forward, and forget those before the last `number`; in place where as many stay."""
        query = torch.cat([self.query, inputs.query[..., -self.number :, :]], dim=3)[..., -self.number :, :]
        positions = torch.cat([self.positions, inputs.query_positions[:, -self.number :]], dim=1)[:, -self.number :]
        if query.shape == self.query.shape:
            self.query.copy_(query)
            self.positions.copy_(positions)
        else:  # copies: a view would hold a whole prompt's queries
            self.query, self.positions = query.clone(), positions.clone()

    @property
    def buffers(self) -> list[Tensor]:
        """What a forward of one token changes in place."""
        return [self.query, self.positions]

    def logits(self, inputs: AttentionInputs) -> Tensor:
        """Their logits [B, H, G, n, S] over the slots of `inputs`; -inf for later and evicted slots, and for padding.

        float32 (float64 for a float64 model). inputs: of the newest forward, at original positions.
        """
        count = self.query.shape[3]
        mine = replace(inputs, query=self.query, query_positions=self.positions, all_visible=False)
        x = mine.logits(slice(0, count), inputs.keys.shape[2])
        return x.masked_fill_((self.positions < 0)[:, None, None, :, None], -torch.inf)

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder batch rows."""
        rows = rows.to(self.query.device)
        self.query, self.positions = self.query[rows], self.positions[rows]


class StateChanges:
    """How much the hidden state changes from one generated token to the next: ||h_t - h_(t-1)||_2 of what layers get.

    shares: of the model's depth, 0 to 1, which say what layers. A token's changes are known to all layers from the next
    forward on. ConfigError where they are fewer layers than shares.
    """

    def __init__(self, shares: Sequence[float], layers: int) -> None:
        self.places = [int(share * layers) for share in shares]
        if len(set(self.places)) < len(shares) or max(self.places) >= layers:
            given = ", ".join(f"{share:g}" for share in shares)
            raise ConfigError(f"shares {given} of {layers} layers must be below 1 and name a layer each")
        self.reset()

    def reset(self) -> None:
        """Forget everything: another prompt may follow."""
        self.seen = dict.fromkeys(self.places, 0)  # columns, by layer
        self.last: dict[int, Tensor] = {}  # by layer, [B, 1, n]: the newest token's state
        self.changes: dict[int, Tensor] = {}  # by layer, [B, steps]

    def note(self, layer: int, state: Tensor, sequence: SequenceState) -> None:
        """Add the states [B, Q, n] that a layer gets in a forward, where they are asked for."""
        if layer not in self.places:
            return
        # The first layer gets its states before the sequence knows of the forward.
        if self.seen[layer] == 0 or self.seen[layer] < (sequence.prompt_columns or 0):
            self.changes[layer] = state.new_zeros(len(state), 0, dtype=torch.float32)
        else:
            sizes = torch.linalg.vector_norm(torch.cat([self.last[layer], state], 1).float().diff(dim=1), dim=-1)
            self.changes[layer] = torch.cat([self.changes[layer], sizes], 1)
        self.last[layer] = state[:, -1:].clone()
        self.seen[layer] += state.shape[1]

    def before(self, sequence: SequenceState) -> Tensor | None:
        """Changes [B, layers asked for, steps] float32 of tokens generated before this forward; None in the prompt."""
        if sequence.in_prompt:
            return None
        device, steps = self.changes[self.places[0]].device, sequence.decode_steps
        return torch.stack([self.changes[place][:, :steps].to(device) for place in self.places], 1)

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder batch rows."""
        for by_layer in (self.last, self.changes):
            by_layer |= {layer: x[rows.to(x.device)] for layer, x in by_layer.items()}


BLOCK = 4096  # query rows taken at a time: their copy in float32 is not larger


class QueryStatistics:
    """Moments over the queries at positions `after` and later, added up forward by forward.

    count [B]: queries seen; mean [B, H, G, D] and scatter [B, H, G, D, D] (the sum of outer products of deviations
    from the mean), float32. rope: with which the queries were rotated; None: they were not. scale: of the logits.
    """

    def __init__(self, after: int, first: AttentionInputs) -> None:
        """Statistics of no query yet; first: the inputs of the prompt's first forward, for shapes and positions."""
        b, h, g, _, d = first.query.shape
        self.after, self.rope, self.scale = after, first.params.rope, first.params.scale
        self.count = torch.zeros(b, device=first.query.device)
        self.mean = torch.zeros(b, h, g, d, device=first.query.device)
        self.scatter = torch.zeros(b, h, g, d, d, device=first.query.device)

    def add(self, inputs: AttentionInputs) -> None:
        """Add the queries of one forward of the prompt, rotated back to position 0; padding is left out."""
        for query, taken in self._blocks(inputs):
            # Chan's rule for the moments of two parts of a sample.
            number = taken.sum(-1)  # [B]
            weight = taken[:, None, None, :, None]
            mean = (query * weight).sum(-2) / _over_heads(number.clamp_min(1.0))
            apart = (query - mean[..., None, :]) * weight
            share = number / (self.count + number).clamp_min(1.0)
            step = mean - self.mean
            between = step[..., :, None] * step[..., None, :] * _over_heads(self.count * share)[..., None]
            self.scatter = self.scatter + apart.transpose(-1, -2) @ apart + between
            self.mean = self.mean + step * _over_heads(share)
            self.count = self.count + number

    def _blocks(self, inputs: AttentionInputs) -> Iterator[tuple[Tensor, Tensor]]:
        """Queries [B, H, G, n, D] float32 before RoPE, and which are counted [B, n], as 1.0 and 0.0."""
        for query, positions in zip(
            inputs.query.split(BLOCK, dim=3), inputs.query_positions.split(BLOCK, dim=1), strict=True
        ):
            heads = query.float().flatten(1, 2)
            if self.rope is not None:
                heads = self.rope.rotate_by(heads, -positions[:, None])
            yield heads.view(query.shape), (positions >= self.after).float()

    def at(self, first: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Mean [B, H, G, D] and covariance [B, H, G, D, D] of such queries under RoPE's mean over `number` positions.

        first [B]: the first of the positions. The covariance divides by the number of queries.
        """
        covariance = self.scatter / _over_heads(self.count.clamp_min(1.0))[..., None]
        if self.rope is None:
            return self.mean, covariance
        positions = first[:, None] + torch.arange(number, device=first.device)
        rotation = mean_rotation(self.rope, positions, self.mean.shape[-1])[:, None, None]
        mean = (rotation @ self.mean[..., None])[..., 0]
        return mean, rotation @ covariance @ rotation.transpose(-1, -2)

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder batch rows."""
        rows = rows.to(self.count.device)
        self.count, self.mean, self.scatter = self.count[rows], self.mean[rows], self.scatter[rows]


def mean_rotation(rope: RoPE, positions: Tensor, width: int) -> Tensor:
    """The mean [B, width, width] of RoPE's rotation matrices over positions [B, n], for heads of `width` dimensions."""
    angle = positions.to(torch.float32)[..., None] * rope.inv_freq.to(positions.device, torch.float32)
    cos, sin = angle.cos().mean(1), angle.sin().mean(1)  # [B, pairs]
    pairs = torch.arange(cos.shape[-1], device=positions.device)
    a, b = (2 * pairs, 2 * pairs + 1) if rope.interleaved else (pairs, pairs + len(pairs))
    rotation = torch.eye(width, device=positions.device).repeat(len(positions), 1, 1)
    rotation[:, a, a], rotation[:, b, b] = cos, cos
    rotation[:, a, b], rotation[:, b, a] = -sin, sin
    return rotation


def _over_heads(x: Tensor) -> Tensor:
    """x [B] as [B, 1, 1, 1]."""
    return x[:, None, None, None]


CALIBRATION_BLOCK = 1024  # tokens of a calibration pass taken at a time: their copies in float64 are not larger


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """16 hex digits of all numbers; ConfigError where they are not finite float32."""
    total = hashlib.sha256()
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or not bool(tensor.isfinite().all()):
            raise ConfigError(f"{name} must be finite numbers in float32")
        total.update(f"{name} {list(tensor.shape)}\n".encode() + tensor.contiguous().numpy().tobytes())
    return total.hexdigest()[:16]


def _check_shape(name: str, tensor: Tensor, wanted: list[int]) -> None:
    """ConfigError where statistics were made of a model of another shape."""
    if list(tensor.shape) != wanted:
        raise ConfigError(f"{name} = {list(tensor.shape)}, are of another model: this one's are {wanted}")


@dataclass(frozen=True)
class QueryCalibration:
    """Statistics of all queries of a calibration pass, in each layer and query head; float32, on the CPU.

    direction [L, H, G, D]: the unit vector along which the queries, RoPE applied, have their largest mean square,
    pointed to the side of their mean. mean [L, H, G, D]: of the queries before RoPE. size [L, H, G, n]: the mean length
    of each of the n pairs of dimensions that RoPE turns; n is 0 for models without RoPE. digest: 16 hex digits of all
    numbers; calibrations with the same digest are equal.
    """

    digest: str
    direction: Tensor = field(compare=False, repr=False)
    mean: Tensor = field(compare=False, repr=False)
    size: Tensor = field(compare=False, repr=False)

    @classmethod
    def of(cls, direction: Tensor, mean: Tensor, size: Tensor) -> QueryCalibration:
        """The calibration with its digest; ConfigError for tensors that do not go together or hold no numbers."""
        given = {"direction": direction, "mean": mean, "size": size}
        if direction.ndim != 4 or mean.shape != direction.shape or size.shape[:3] != direction.shape[:3]:
            shapes = [list(tensor.shape) for tensor in given.values()]
            raise ConfigError(f"tensors of shapes {shapes} are not the statistics of one model's queries")
        return cls(_digest(given), direction, mean, size)

    def layer(self, index: int) -> QueryCalibration:
        """The statistics of one layer: tensors without L."""
        return replace(self, direction=self.direction[index], mean=self.mean[index], size=self.size[index])

    def to(self, device: torch.device) -> QueryCalibration:
        """The statistics on a device: itself where it lies there already."""
        if self.mean.device == device:
            return self
        direction, mean, size = (tensor.to(device) for tensor in (self.direction, self.mean, self.size))
        return replace(self, direction=direction, mean=mean, size=size)

    def check_shape(self, layers: int, heads: int, group: int, width: int) -> None:
        """ConfigError where the model has other numbers of layers, kv heads, query heads per kv head or dimensions."""
        _check_shape("queries of this calibration, [L, H, G, D]", self.mean, [layers, heads, group, width])


class QuerySums:
    """Sums over the queries of one layer, added up sequence by sequence in float64, of which statistics are made."""

    def __init__(self) -> None:
        self.count = 0
        self.squares = self.total = self.before = self.sizes = torch.zeros((), dtype=torch.float64)

    def add(self, query: Tensor, positions: Tensor, rope: RoPE | None) -> None:
        """Add queries [H, G, Q, D], RoPE applied, that stand at positions [Q]. rope: the model's; None: it has none."""
        self.count += query.shape[2]
        for block, at in zip(query.split(CALIBRATION_BLOCK, dim=2), positions.split(CALIBRATION_BLOCK), strict=True):
            rows = block.double()
            self.squares = self.squares + (rows.transpose(-1, -2) @ rows).cpu()
            self.total = self.total + rows.sum(-2).cpu()
            if rope is None:
                self.before, self.sizes = self.total, torch.zeros(*query.shape[:2], 0, dtype=torch.float64)
                continue
            # In float32 whatever the model's dtype: an angle in half precision is no angle.
            before = rope.rotate_by(block.float().flatten(0, 1)[None], -at[None, None])[0].view(block.shape)
            self.before = self.before + before.double().sum(-2).cpu()
            self.sizes = self.sizes + torch.linalg.vector_norm(rope.pairs(before.double()), dim=-1).sum(-2).cpu()

    def statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        """direction [H, G, D], mean [H, G, D], size [H, G, n], as in `QueryCalibration`; ConfigError for infinities."""
        if not bool(self.squares.isfinite().all()):
            raise ConfigError("the model's queries are not finite: calibrate in model.dtype=float32 or bfloat16")
        main = torch.linalg.eigh(self.squares).eigenvectors[..., -1]
        main = torch.where((main * self.total).sum(-1, keepdim=True) < 0, -main, main)
        return main.float(), (self.before / self.count).float(), (self.sizes / self.count).float()


LENGTH = 500  # positions over which a head's mean query and key are laid out, as in kvpress


@dataclass(frozen=True)
class HeadScores:
    """A score of every kv head, [L, H] float32 on the CPU, from 0 to 1: high for heads that look far back.

    The mean query and the mean key of a head, both before RoPE, are laid out over LENGTH positions; the score is the
    area under the cumulated attention of the last query, from the first key on, mean over the query heads of a kv head
    and over sequences. Source: kvpress's on-the-fly scoring of DuoAttention (arXiv:2410.10819), where the authors train
    gates. digest: 16 hex digits of all numbers.
    """

    digest: str
    scores: Tensor = field(compare=False, repr=False)

    @classmethod
    def of(cls, scores: Tensor) -> HeadScores:
        """The scores with their digest; ConfigError for a tensor that holds no score of every head."""
        if scores.ndim != 2 or scores.dtype != torch.float32 or not bool(scores.isfinite().all()):
            raise ConfigError(
                f"scores of heads must be finite float32 numbers [L, H], got {scores.dtype} {list(scores.shape)}"
            )
        content = f"{list(scores.shape)}\n".encode() + scores.contiguous().numpy().tobytes()
        return cls(hashlib.sha256(content).hexdigest()[:16], scores)

    def check_shape(self, layers: int, heads: int) -> None:
        """ConfigError where the model has other numbers of layers or kv heads."""
        _check_shape("scores of heads, [L, H]", self.scores, [layers, heads])

    def best(self, count: int) -> Tensor:
        """[L, H] bool: the `count` heads of the highest scores; equal scores go to the lower layer, then head."""
        order = self.scores.flatten().argsort(descending=True, stable=True)
        chosen = torch.zeros(self.scores.numel(), dtype=torch.bool)
        chosen[order[:count]] = True
        return chosen.view(self.scores.shape)


class HeadScoreSums:
    """Scores of one layer's heads, added up sequence by sequence; nothing where a model has no RoPE."""

    def __init__(self) -> None:
        self.count, self.total = 0, torch.zeros((), dtype=torch.float64)

    def add(self, query: Tensor, key: Tensor, positions: Tensor, params: AttentionParams) -> None:
        """Add a sequence: query [H, G, Q, D] and key [H, Q, D] with RoPE applied, at positions [Q]."""
        if params.rope is None:
            return
        queries = mean_before_rope(query.flatten(0, 1), positions, params.rope).view(*query.shape[:2], -1)
        keys = mean_before_rope(key, positions, params.rope)
        self.total = self.total + retrieval_scores(queries, keys, params.rope, params.scale).cpu().double()
        self.count += 1

    def mean(self) -> Tensor | None:
        """The scores [H] float32, mean over sequences; None where there is none."""
        return (self.total / self.count).float() if self.count else None


def mean_before_rope(states: Tensor, positions: Tensor, rope: RoPE) -> Tensor:
    """The mean [N, D] float32 of states [N, Q, D] over tokens, turned back by their positions [Q]."""
    total = torch.zeros(len(states), states.shape[-1], dtype=torch.float64, device=states.device)
    for block, at in zip(states.split(CALIBRATION_BLOCK, dim=1), positions.split(CALIBRATION_BLOCK), strict=True):
        total += rope.rotate_by(block.float()[None], -at[None, None])[0].double().sum(1)
    return (total / states.shape[1]).float()


def retrieval_scores(query: Tensor, key: Tensor, rope: RoPE, scale: float) -> Tensor:
    """The scores [H] of `HeadScores` from mean queries [H, G, D] and mean keys [H, D], before RoPE."""
    places = torch.arange(LENGTH, device=key.device)
    keys = rope.rotate_by(key[:, None].expand(-1, LENGTH, -1)[None], places[None, None])[0]
    last = rope.rotate_by(query[None], places[-1:][None, None].expand(1, *query.shape[:2]))[0]
    attention = torch.softmax((last @ keys.transpose(-1, -2)) * scale, dim=-1)  # [H, G, LENGTH]
    return attention.cumsum(-1).mean(-1).mean(-1)


class CalibrationLayer:
    """A `LayerCache` that keeps nothing but sums over queries: each forward is a whole sequence, `reset` between them.

    sums, head_scores: over all sequences so far.
    """

    def __init__(self) -> None:
        self.sums, self.head_scores, self.seq_len = QuerySums(), HeadScoreSums(), 0

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """Attend with all tokens of one sequence, B = 1, no padding; arguments and result of `LayerCache.forward`."""
        if self.seq_len or key.shape[0] > 1 or (padding is not None and not bool(padding.all())):
            raise CacheError("a calibration pass takes one sequence in one forward, without padding")
        h, self.seq_len = key.shape[1], key.shape[2]
        positions = torch.arange(self.seq_len, device=key.device)
        grouped = query.unflatten(1, (h, query.shape[1] // h))
        self.sums.add(grouped[0], positions, params.rope)
        self.head_scores.add(grouped[0], key[0], positions, params)
        inputs = AttentionInputs(
            query=grouped,
            keys=key,
            values=value,
            positions=positions[None, None],
            query_positions=positions[None],
            params=params,
            in_column_order=True,
            padded=False,
        )
        return compute_attention(inputs).flatten(1, 2)

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Always a CacheError: a calibration pass has one row."""
        raise CacheError("a calibration pass takes one sequence: rows cannot be reordered")

    def reset(self) -> None:
        """The next forward is another sequence; the sums stay."""
        self.seq_len = 0


@dataclass(frozen=True)
class Surrogate:
    """Linear maps from a layer's input to the scores of its kv heads; float32, on the CPU.

    weight [L, H, n], bias [L, H]: n the model's width. digest: 16 hex digits of all numbers; surrogates with the same
    digest are equal.
    """

    digest: str
    weight: Tensor = field(compare=False, repr=False)
    bias: Tensor = field(compare=False, repr=False)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor) -> Surrogate:
        """The surrogate with its digest; ConfigError for tensors that do not go together or hold no numbers."""
        if weight.ndim != 3 or bias.shape != weight.shape[:2]:
            raise ConfigError(
                f"tensors of shapes {list(weight.shape)} and {list(bias.shape)} are not weight and bias of a surrogate"
            )
        return cls(_digest({"weight": weight, "bias": bias}), weight, bias)

    def layer(self, index: int) -> Surrogate:
        """The map of one layer: tensors without L."""
        return replace(self, weight=self.weight[index], bias=self.bias[index])

    def check_shape(self, layers: int, heads: int, width: int) -> None:
        """ConfigError where the model has other numbers of layers or kv heads, or another width."""
        _check_shape("weights of this surrogate, [L, H, n]", self.weight, [layers, heads, width])

    def scores(self, inputs: Tensor) -> Tensor:
        """Scores [B, H, Q] float32 of tokens by the inputs [B, Q, n] of the layer that this map is of.

        In float64: in the first layer equal tokens have equal inputs, and which of them is kept must not hang on the
        order of a sum.
        """
        on = self.on(inputs.device)
        return (inputs.double() @ on.weight.T + on.bias).transpose(1, 2).float()

    def on(self, device: torch.device) -> Surrogate:
        """This map in float64 on a device: itself where it is there already."""
        weight, bias = (tensor.to(device, torch.float64) for tensor in (self.weight, self.bias))
        return self if weight is self.weight and bias is self.bias else replace(self, weight=weight, bias=bias)
