"""What a decode step of several caches observes where that is not attention itself: softmax((x + zeta) / tau)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from kvexp.core.decode.decodable_layer import DecodableLayer
from kvexp.core.observe.noise import AHEAD, Noise


class TauSchedule:
    """tau of every row by the schedules of its cache; those of AHEAD steps come to the device at once."""

    def __init__(self, states: list[DecodableLayer], sizes: list[int]) -> None:
        self.states, self.sizes = states, sizes
        self._of: tuple[int, list[int | None]] = (0, [])  # the first step, and the ends of the schedules
        self._table = torch.empty(0)

    def now(self, device: torch.device) -> Tensor:
        """[R] float32 at the step in progress; 1 for rows that are not observed."""
        step, ends = self.states[0].timeline.query_steps[0], [state.timeline.max_new_tokens for state in self.states]
        if self._of[1] != ends or not 0 <= step - self._of[0] < len(self._table):
            last = min([step + AHEAD, *(max(end, step) for end in ends if end is not None)])
            rows = [self._row(at) for at in range(step, last + 1)]
            self._of, self._table = (step, ends), torch.tensor(rows, device=device)
        return self._table[step - self._of[0]]

    def _row(self, step: int) -> list[float]:
        each = [
            1.0 if state.view is None else state.view.tau_at(step, state.timeline.max_new_tokens)
            for state in self.states
        ]
        return [tau for tau, size in zip(each, self.sizes, strict=True) for _ in range(size)]


class NoisedObserver:
    """Caches next to each other in a stack that observe through one kind of noise, each at its own temperature."""

    def __init__(self, rows: slice, states: list[DecodableLayer], sizes: list[int]) -> None:
        self.rows, self.states, self.sizes = rows, states, sizes
        self.noise: Noise | None = states[0].view.noise if states[0].view is not None else None
        self.temperatures = TauSchedule(states, sizes)
        self._following: tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]] | None = None

    def zeta(self, positions: Tensor, where: Tensor, layers: Sequence[int], groups: int) -> list[Tensor] | None:
        """Per layer the noise [R, H, G, 1, S] (or a scalar) of queries at positions [R, 1] and slots at where [L, R, H,
        S]; None where there is none. To be called once a step."""
        if self.noise is None:
            return None
        count, heads = len(layers), where.shape[2] * groups
        if self._following is None or self._following[0] != tuple(layers):
            seeds = torch.cat([state.timeline.seeds.to(where.device) for state in self.states])
            self._following = tuple(layers), self.noise.following(seeds, layers, heads)
        drawn = self._following[1](positions.repeat(count, 1), where.flatten(0, 1))
        if drawn.ndim == 0:
            return [drawn] * count
        return list(drawn.unflatten(1, (-1, groups)).split(positions.shape[0]))

    def observed(self, x: Tensor, zeta: Tensor | None, tau: Tensor) -> Tensor:
        """[R, H, G, 1, S] of rows x [R, H, G, 1, S]; tau [R]."""
        # A tensor: dividing by a Python number multiplies by its reciprocal, which rounds otherwise.
        tau = tau[:, None, None, None, None]
        return torch.softmax(x / tau if zeta is None else (x + zeta).div_(tau), dim=-1)


def ahead(
    parts: Sequence[NoisedObserver], positions: Tensor, where: Tensor, layers: Sequence[int], groups: int
) -> list[tuple[list[Tensor] | None, Tensor]]:
    """`zeta` and the temperatures of every run, once a step; positions [R, 1] and where [L, R, H, S] of all rows."""
    return [
        (part.zeta(positions[part.rows], where[:, part.rows], layers, groups), part.temperatures.now(positions.device))
        for part in parts
    ]


def turn(state: DecodableLayer) -> tuple[int, str]:
    """The order of caches in a stack: those that observe attention as it is, tempered or noised, and not at all."""
    if state.view is None:
        return 2, ""
    return (0, "") if state.view.plain else (1, repr(state.view.noise))


def runs(states: list[DecodableLayer], sizes: list[int], start: int) -> list[NoisedObserver]:
    """The runs of equal noise among the states that do not observe attention as it is; the first row is `start`."""
    made = []
    pairs = [(state, size) for state, size in zip(states, sizes, strict=True) if turn(state)[0] == 1]
    for _, run in groupby(pairs, key=lambda pair: turn(pair[0])):
        some, counts = map(list, zip(*run, strict=True))
        made.append(NoisedObserver(slice(start, start + sum(counts)), some, counts))
        start += sum(counts)
    return made
