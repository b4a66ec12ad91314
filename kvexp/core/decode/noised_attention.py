"""What rows observe in a fast decode step under a temperature or noise: softmax((x + zeta) / tau) of their logits x."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from kvexp.core.decode.decodable_layer import DecodableLayer
from kvexp.core.observe.noise import STEPS_AHEAD, Noise, PooledDraws
from kvexp.core.observe.step_input import StepInput


class TauSchedule:
    """The temperature tau of every stacked row, by its cache's schedule.

    states: one layer of each cache; sizes: batch rows of each. STEPS_AHEAD steps are sent to the device at once.
    """

    def __init__(self, states: list[DecodableLayer], sizes: list[int]) -> None:
        self.states, self.sizes = states, sizes
        self.held = StepInput()
        self._of: tuple[int, list[int | None]] = (0, [])  # the first step, and the ends of the schedules
        self._table = torch.empty(0)

    def current(self, device: torch.device) -> Tensor:
        """tau [R] float32 of the step in progress; 1 for rows that observe nothing."""
        return self.from_schedule(device) if self.held.value is None else self.held.value

    def from_schedule(self, device: torch.device) -> Tensor:
        """`current`, from the schedule: a view of a table, at another address in every step."""
        step, ends = self.states[0].sequence.query_steps[0], [state.sequence.max_new_tokens for state in self.states]
        if self._of[1] != ends or not 0 <= step - self._of[0] < len(self._table):
            last = min([step + STEPS_AHEAD, *(max(end, step) for end in ends if end is not None)])
            rows = [self._row(at) for at in range(step, last + 1)]
            self._of, self._table = (step, ends), torch.tensor(rows, device=device)
        return self._table[step - self._of[0]]

    def _row(self, step: int) -> list[float]:
        """tau of the R rows at decode step `step`; 1 for rows that observe nothing."""
        each = [
            1.0 if state.score_spec is None else state.score_spec.tau_at(step, state.sequence.max_new_tokens)
            for state in self.states
        ]
        return [tau for tau, size in zip(each, self.sizes, strict=True) for _ in range(size)]


class NoisedObserver:
    """Adjacent caches of a stack that observe through the same kind of noise, each at its own temperature.

    rows: their rows in the stack; states: one layer of each cache; sizes: batch rows of each.
    """

    def __init__(self, rows: slice, states: list[DecodableLayer], sizes: list[int]) -> None:
        self.rows, self.states, self.sizes = rows, states, sizes
        self.noise: Noise | None = states[0].score_spec.noise if states[0].score_spec is not None else None
        self.tau_schedule = TauSchedule(states, sizes)
        self._stepper: tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]] | None = None

    def noise_for(
        self, positions: Tensor, slot_positions: Tensor, layers: Sequence[int], groups: int
    ) -> list[Tensor] | None:
        """The noise of each layer, [R, H, G, 1, S] or a scalar; None where these rows have no noise.

        positions [R, 1]: of the new tokens; slot_positions [L, R, H, S]; layers: their L numbers; groups: query heads
        per kv head. To be called exactly once per decode step, since the draws follow the steps.
        """
        if self.noise is None:
            return None
        count, heads = len(layers), slot_positions.shape[2] * groups
        if self._stepper is None or self._stepper[0] != tuple(layers):
            seeds = torch.cat([state.sequence.seeds.to(slot_positions.device) for state in self.states])
            self._stepper = tuple(layers), self.noise.make_stepper(seeds, layers, heads)
        drawn = self._stepper[1](positions.repeat(count, 1), slot_positions.flatten(0, 1))
        if drawn.ndim == 0:
            return [drawn] * count
        return list(drawn.unflatten(1, (-1, groups)).split(positions.shape[0]))

    def hold_inputs(self, positions: Tensor) -> None:
        """Take tau and noise offsets of the step in progress from their schedules, and hold them where they always are.

        positions [R, 1]: of the new tokens. Before the step is computed, and after one that drew its own.
        """
        self.tau_schedule.held.hold(self.tau_schedule.from_schedule(positions.device))
        layers, draws = ((), None) if self._stepper is None else self._stepper
        if isinstance(draws, PooledDraws):
            draws.pool_offsets.held.hold(draws.pool_offsets.draw_next(positions.repeat(len(layers), 1)))

    def release_inputs(self) -> None:
        """End the step: the next one draws its own, or its inputs are held anew."""
        self.tau_schedule.held.release()
        if self._stepper is not None and isinstance(self._stepper[1], PooledDraws):
            self._stepper[1].pool_offsets.held.release()

    def observed_probs(self, x: Tensor, zeta: Tensor | None, tau: Tensor) -> Tensor:
        """softmax((x + zeta) / tau) of the logits x [R, H, G, 1, S], tau [R]; same shape."""
        # A tensor: dividing by a Python number multiplies by its reciprocal, which rounds otherwise.
        tau = tau[:, None, None, None, None]
        return torch.softmax(x / tau if zeta is None else (x + zeta).div_(tau), dim=-1)


def next_noise_and_tau(
    parts: Sequence[NoisedObserver], positions: Tensor, slot_positions: Tensor, layers: Sequence[int], groups: int
) -> list[tuple[list[Tensor] | None, Tensor]]:
    """Per `NoisedObserver`: its noise of each layer (`noise_for`, whose arguments these are), and tau of its rows.

    To be called exactly once per decode step, since the draws follow the steps.
    """
    return [
        (
            part.noise_for(positions[part.rows], slot_positions[:, part.rows], layers, groups),
            part.tau_schedule.current(positions.device),
        )
        for part in parts
    ]


def stack_order(state: DecodableLayer) -> tuple[int, str]:
    """Sort key of caches in a stack: plain attention first, then tempered or noised, last without observation."""
    if state.score_spec is None:
        return 2, ""
    return (0, "") if state.score_spec.is_plain else (1, repr(state.score_spec.noise))


def group_by_noise(states: list[DecodableLayer], sizes: list[int], start: int) -> list[NoisedObserver]:
    """One `NoisedObserver` per run of adjacent caches with the same noise.

    For caches that observe under noise or a temperature. states: one layer of each cache, in `stack_order`; sizes:
    batch rows of each; start: the first row of such a cache.
    """
    made = []
    pairs = [(state, size) for state, size in zip(states, sizes, strict=True) if stack_order(state)[0] == 1]
    for _, run in groupby(pairs, key=lambda pair: stack_order(pair[0])):
        some, counts = map(list, zip(*run, strict=True))
        made.append(NoisedObserver(slice(start, start + sum(counts)), some, counts))
        start += sum(counts)
    return made
