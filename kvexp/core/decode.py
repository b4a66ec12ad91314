"""The parts of a decode step: which slots go, temperatures and noise, moved sinks, heads of different width.

Its protection of sinks and recent slots and its choice of one victim are the rules of `kvexp.core.ranking.rank` and
`kvexp.core.slot_order` for a single new token; tests hold both to the same kept sets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvexp.core.attention import SWAP_MIN_HEAD_DIM, AttentionParams, decode_logits, softcapped
from kvexp.core.backends import InPlace
from kvexp.core.noise import STEPS_AHEAD, Noise, PooledDraws, StepInput
from kvexp.core.slot_order import INT64_MAX, lowest, lowest_slots
from kvexp.core.slots import RaggedSlots, Slots

if TYPE_CHECKING:
    from kvexp.core.eviction import EvictionLayer


class BatchedEviction:
    """Accumulates scores and selects the slot to evict, for the stacked rows of one or several caches.

    Tensors are [R, H, S] for one layer's stacked rows, or [L, R, H, S] for layers whose rows have the same budgets.

    states: one layer of each cache; sizes: batch rows of each cache, R in all; backends: of the same caches.
    capacities: slots allocated by each cache. out_of_budget [R, 1 or H, S] bool: slots that a row's or head's budget
    does not reach, None where there are none. at_budget: every row holds all tokens its budget allows, so which slots
    are dead after an eviction never changes. no_padding_slots: every row uses every slot. has_recent: some row protects
    newest tokens. is_window, priority_is_score: hold for the methods of all caches. every: steps between evictions.
    """

    def __init__(self, states: list[EvictionLayer], sizes: list[int], backends: list[InPlace]) -> None:
        self.states, self.sizes, self._backends = states, sizes, backends
        self.capacities = [state.require_slots().positions.shape[2] for state in states]
        self.no_padding_slots = all(backend.no_padding_slots for backend in backends) and len(set(self.capacities)) <= 1
        self.at_budget = all(backend.at_budget for backend in backends)  # then what is dead never changes
        self.out_of_budget = None if self.no_padding_slots else self.reach
        self.is_ragged = any(state.config.is_ragged for state in states)
        self.max_sinks, self.priority_is_score = 0, True
        self.sinks: int | Tensor = 0
        self.every = backends[0].every or 1 if backends else 1
        if not states:
            return
        budgets = [state.layer_slots for state in states if state.layer_slots is not None]
        self.recent = cat_rows([allowed.recent_by_head for allowed in budgets])[..., None]
        self.has_recent = any(recent for allowed in budgets for recent in allowed.recent)
        sinks = [state.config.method.sinks for state in states]
        self.sinks = sinks[0] if len(set(sinks)) == 1 else self._by_row([float(n) for n in sinks])
        self.max_sinks = max(sinks)
        self.streaming = budgets[0].streaming  # such a cache has a stack of its own
        if self.streaming is not None:
            self.sinks = torch.where(self.streaming, budgets[0].stream_sinks, sinks[0])[..., None]
            self.max_sinks = max(self.max_sinks, budgets[0].stream_sinks)
        self.is_window = all(state.config.method.is_window and state.config.plain_choice for state in states)
        self.priority_is_score = all(state.evicts_by_score for state in states)
        decays = [1.0 if state.score_spec is None else state.score_spec.decay for state in states]
        uniform = decays[0] if len(set(decays)) == 1 else None
        self.decay = None if uniform == 1 else self._by_row(decays) if uniform is None else uniform

    @property
    def reach(self) -> Tensor:
        """[R, 1 or H, S] bool: as `out_of_budget`, all False where every row uses every slot."""
        masks = [backend.out_of_budget for backend in self._backends if backend.out_of_budget is not None]
        return cat_rows([pad_last_dim(mask, max(self.capacities), True) for mask in masks])

    def widen(self, columns: int) -> None:
        """Widen the stack of one cache to `columns` columns; new ones are out of budget."""
        self.out_of_budget, self.capacities = pad_last_dim(self.reach, columns, True), [columns]
        self.no_padding_slots = False
        for backend in self._backends:
            backend.out_of_budget, backend.no_padding_slots = self.out_of_budget, False

    @property
    def policy(self) -> tuple[Any, ...]:
        """Batch sizes, budgets and slots of the rows; equal where layers of the same caches can evict together.

        Heads with slots of their own need not have as many as in another layer.
        """
        budgets = [state.layer_slots for state in self.states if state.layer_slots is not None]
        limits = [(allowed.slots, allowed.kept, allowed.recent) for allowed in budgets]
        rectangle = () if self.is_ragged else (self.capacities, self.no_padding_slots)
        return self.sizes, self.at_budget, limits, *rectangle

    def same_policy(self, other: BatchedEviction) -> bool:
        """Whether another layer's stack of the same caches can evict together with this one.

        Heads with slots of their own must hold as many as they may, and the same heads stream.
        """
        if self.policy != other.policy or (self.is_ragged and not self.at_budget):
            return False
        mask, theirs = self.streaming, other.streaming
        return mask is theirs is None or (mask is not None and theirs is not None and torch.equal(mask, theirs))

    def accumulate(self, score: Tensor, sums: Tensor) -> None:
        """Decay the score [.., R, H, S] and add column sums [.., n, H, S] of the first n rows, in place.

        n: the rows of caches that observe attention, which come first in a stack (`stack_order`); it may be 0.
        """
        if not sums.shape[-3]:
            return
        if self.decay is not None:
            score.mul_(self.decay)
        score[..., : sums.shape[-3], :, :] += sums

    @property
    def is_due(self) -> bool:
        """Whether the step in progress ends with an eviction; the same in all caches of a stack."""
        return all(backend.num_free == 1 for backend in self._backends)

    def advance(
        self,
        positions: Tensor,
        score: Tensor,
        free_slots: Tensor,
        sums: Tensor,
        priority: Callable[[], Tensor],
        newest: Tensor,
        window: int | None,
        out_of_budget: Tensor | None = None,
    ) -> bool:
        """Accumulate column sums and set the slots of the next tokens, in place; returns whether slots were evicted.

        positions, score [.., R, H, S]; free_slots [.., R, H, every]: the first has just been written; sums: as of
        `accumulate`; priority: of every slot, where it is not the score; others as of `select_victims`.
        """
        self.accumulate(score, sums)
        if not self.is_due:
            free_slots.copy_(free_slots.roll(-1, -1))
            return False
        by = score if self.priority_is_score else priority()
        victims = self.select_victims(positions, by, newest, window, out_of_budget)
        positions.scatter_(-1, victims, -1)
        free_slots.copy_(victims)
        return True

    def select_victims(
        self,
        positions: Tensor,
        priority: Tensor,
        newest: Tensor,
        window: int | None,
        out_of_budget: Tensor | None = None,
    ) -> Tensor:
        """The slots [.., R, H, every] to evict: the lowest priorities not protected, among equals the oldest tokens.

        positions, priority [.., R, H, S]; dead slots count as lower than any live one. newest [R, 1, 1]: position id of
        the newest token; window: the model's sliding window, behind which a slot is evicted first. out_of_budget: of
        several layers [L, R, H, S]; None: that of this stack.
        """
        out_of_budget = self.out_of_budget if out_of_budget is None else out_of_budget
        if self.is_window:  # the oldest token goes, so the newest need no protection
            kept = positions < self.sinks if self.at_budget else (positions < self.sinks) & (positions >= 0)
            kept = kept if out_of_budget is None else kept | out_of_budget
            return lowest(positions.masked_fill(kept, INT64_MAX), self.every)
        if window is not None:
            priority = priority.masked_fill(positions <= newest + 1 - window, -torch.inf)
        protected = positions > newest - self.recent if self.has_recent else None
        if self.max_sinks:
            sinks = positions < self.sinks
            protected = sinks if protected is None else protected | sinks
        if out_of_budget is not None:
            if not self.at_budget:
                priority = priority.masked_fill(positions < 0, -torch.inf)
                protected = None if protected is None else protected & (positions >= 0)
            protected = out_of_budget if protected is None else protected | out_of_budget
        if protected is not None:
            priority = priority.masked_fill(protected, torch.inf)
        return lowest_slots(priority, positions, self.every)

    def _by_row(self, values: list[float]) -> Tensor:
        """One value per cache, repeated for each of its rows: [R, 1, 1] float32."""
        by_row = [v for value, size in zip(values, self.sizes, strict=True) for v in [value] * size]
        return torch.tensor(by_row, device=self.states[0].require_slots().positions.device)[:, None, None]


def pad_last_dim(x: Tensor, width: int, value: float) -> Tensor:
    """x [.., S] padded behind with `value` to [.., width]."""
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]), value=value)


def cat_rows(parts: list[Tensor]) -> Tensor:
    """Tensors concatenated along the rows; a single tensor is returned as it is, without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class TauSchedule:
    """The temperature tau of every stacked row, by its cache's schedule.

    states: one layer of each cache; sizes: batch rows of each. STEPS_AHEAD steps are sent to the device at once.
    """

    def __init__(self, states: list[EvictionLayer], sizes: list[int]) -> None:
        self.states, self.sizes = states, sizes
        self.held = StepInput()
        self._of: tuple[int, list[int | None]] = (0, [])  # the first step, and the ends of the schedules
        self._table = torch.empty(0)

    def current(self, device: torch.device) -> Tensor:
        """Temperatures [R] float32 of the step in progress; 1 for rows that observe nothing."""
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
        """Temperatures of the R rows at decode step `step`; 1 for rows that observe nothing."""
        taus = [
            1.0 if state.score_spec is None else state.score_spec.tau_at(step, state.sequence.max_new_tokens)
            for state in self.states
        ]
        return [tau for tau, size in zip(taus, self.sizes, strict=True) for _ in range(size)]


class NoisedObserver:
    """Adjacent caches of a stack that observe through the same kind of noise, each at its own temperature.

    rows: their rows in the stack; states: one layer of each cache; sizes: batch rows of each.
    """

    def __init__(self, rows: slice, states: list[EvictionLayer], sizes: list[int]) -> None:
        self.rows, self.states, self.sizes = rows, states, sizes
        self.noise: Noise | None = states[0].score_spec.noise if states[0].score_spec is not None else None
        self.tau_schedule = TauSchedule(states, sizes)
        self._stepper: tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]] | None = None

    def noise_and_tau(
        self, positions: Tensor, slot_positions: Tensor, layers: Sequence[int], groups: int
    ) -> tuple[list[Tensor] | None, Tensor]:
        """The noise of each layer, [n, H, G, 1, S] or a scalar (None: these n rows have none), and tau [n].

        positions [R, 1]: of the new tokens of all rows; slot_positions [L, R, H, S]; layers: their L numbers; groups:
        query heads per kv head. To be called exactly once per decode step, since the draws follow the steps.
        """
        positions, slot_positions = positions[self.rows], slot_positions[:, self.rows]
        tau = self.tau_schedule.current(positions.device)
        if self.noise is None:
            return None, tau
        count, heads = len(layers), slot_positions.shape[2] * groups
        if self._stepper is None or self._stepper[0] != tuple(layers):
            seeds = torch.cat([state.sequence.seeds.to(slot_positions.device) for state in self.states])
            self._stepper = tuple(layers), self.noise.make_stepper(seeds, layers, heads)
        drawn = self._stepper[1](positions.repeat(count, 1), slot_positions.flatten(0, 1))
        if drawn.ndim == 0:
            return [drawn] * count, tau
        return list(drawn.unflatten(1, (-1, groups)).split(positions.shape[0])), tau

    def hold_inputs(self, positions: Tensor) -> None:
        """Take tau and noise offsets of the step in progress from their schedules, and hold them at fixed addresses.

        positions [R, 1]: of the new tokens of all rows. Before the step is computed, and after one that drew its own.
        """
        self.tau_schedule.held.hold(self.tau_schedule.from_schedule(positions.device))
        layers, draws = ((), None) if self._stepper is None else self._stepper
        if isinstance(draws, PooledDraws):
            draws.pool_offsets.held.hold(draws.pool_offsets.draw_next(positions[self.rows].repeat(len(layers), 1)))

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


def stack_order(state: EvictionLayer) -> tuple[int, str]:
    """Sort key of caches in a stack: those that grow, plain attention, tempered or noised, without observation."""
    if state.config.only_grows:
        return -1, ""
    if state.score_spec is None:
        return 2, ""
    return (0, "") if state.score_spec.is_plain else (1, repr(state.score_spec.noise))


def stack_kind(state: EvictionLayer) -> tuple[bool, bool, int, int, bool]:
    """What caches of one stack have in common: renumbered positions, how slots are chosen, when they evict, biases.

    Those that only grow go with caches that evict after every step.
    """
    config, backend, biased = state.config, state.backend, state.require_slots().bias is not None
    if config.only_grows or not isinstance(backend, InPlace):
        return config.renumbered, True, 1, 1, biased
    return config.renumbered, config.plain_choice, backend.every or 1, backend.num_free, biased


def group_by_noise(states: list[EvictionLayer], sizes: list[int], start: int) -> list[NoisedObserver]:
    """One `NoisedObserver` per run of adjacent caches with the same noise.

    For caches that observe under noise or a temperature. states: one layer of each cache, in `stack_order`; sizes:
    batch rows of each; start: the first row of such a cache.
    """
    observers = []
    pairs = [(state, size) for state, size in zip(states, sizes, strict=True) if stack_order(state)[0] == 1]
    for _, run in groupby(pairs, key=lambda pair: stack_order(pair[0])):
        run_states, counts = map(list, zip(*run, strict=True))
        observers.append(NoisedObserver(slice(start, start + sum(counts)), run_states, counts))
        start += sum(counts)
    return observers


class SinkRerotation:
    """Computes the logits of the sinks of stacked rows at renumbered positions (StreamingLLM).

    With survivors renumbered 0..S-1, the newest tokens are as far from the query as by their original position ids;
    only the sinks have come nearer, all by the same offset. So their logits are computed from a query that is rotated
    back by this offset, instead of rotating every cached key (`kvexp.core.attention.with_renumbered_positions`).

    max_sinks: the largest number of sinks of a row; sinks: the number, or [R, 1, 1] where rows differ.
    """

    def __init__(self, max_sinks: int, sinks: int | Tensor) -> None:
        self.max_sinks, self.sinks = max_sinks, sinks

    def offset(self, slot_positions: Tensor, newest: Tensor, *, no_padding_slots: bool) -> Tensor:
        """[R, 1, 1]: the query's renumbered position less its original one, newest [R, 1, 1]; never positive.

        slot_positions [R, H, S]: original position ids. no_padding_slots: every slot is live, so none is counted.
        """
        live = slot_positions.shape[-1] if no_padding_slots else (slot_positions[:, :1] >= 0).sum(-1, keepdim=True)
        return live - 1 - newest

    def apply(
        self, x: Tensor, query: Tensor, slots: Slots, newest: Tensor, offset: Tensor, params: AttentionParams
    ) -> None:
        """Replace the sinks' logits in x [R, H, G, 1, S], in place.

        query [R, H, G, 1, D]; newest, offset [R, 1, 1]. Sinks stand in the first slots, where the first eviction puts
        them.
        """
        if params.rope is not None:
            heads = query.flatten(1, 2)
            turned = params.rope.rotate_by(heads, offset)
            query = turned.unflatten(1, query.shape[1:3])
        keys, slot_positions = slots.keys[:, :, : self.max_sinks], slots.positions[:, :, : self.max_sinks]
        nearer = decode_logits(query, keys, slot_positions, newest + offset, params)
        x[..., : self.max_sinks] = torch.where(
            self.is_sink(slot_positions)[:, :, None, None], nearer, x[..., : self.max_sinks]
        )

    def is_sink(self, slot_positions: Tensor) -> Tensor:
        """[R, H, S] bool: which slots, by their original position ids, hold a sink."""
        return (slot_positions >= 0) & (slot_positions < self.sinks)


class RaggedProducts:
    """Logits, probabilities and attention output of one new token per row, one pair of row and kv head after the other.

    slots: packed. Their buffers must stay the same (`Slots.kv_buffers`). A pair's numbers depend on its own slots
    alone, so they do not change with its neighbours in the batch. What the methods take and give lies in buffers that
    the next step overwrites; their parts by pair are made once, as making them takes longer than a small product.
    """

    def __init__(self, slots: RaggedSlots) -> None:
        self.slots = slots
        self._keys, self._values = slots.packed("keys").parts, slots.packed("values").parts
        self._turned = [keys.t() for keys in self._keys]
        self._widths = slots.packed("values").widths
        self._logits = torch.zeros(0)

    def _make_buffers(self, query: Tensor, columns: int) -> None:
        """Make the buffers for queries [R * H, G, D] over `columns` slots."""
        pairs, groups, _ = query.shape
        self._logits = query.new_full((pairs, groups, columns), -torch.inf)
        exact = self._logits.dtype in (torch.float32, torch.float64)
        self._probabilities = torch.zeros_like(self._logits, dtype=None if exact else torch.float32)
        self._weights = self._probabilities.to(self._values[0].dtype)  # the same buffer where the dtypes are
        self._queries = torch.empty_like(query)
        self._logits_by_pair = _by_pair(self._logits, self._widths)
        self._weights_by_pair = _by_pair(self._weights, self._widths)
        self._queries_by_pair = list(self._queries)

    def logits(self, query: Tensor, newest: Tensor, params: AttentionParams) -> Tensor:
        """As `decode_logits`: query [R, H, G, 1, D] -> [R, H, G, 1, S] float32, -inf behind a head's own slots.

        newest [R, 1, 1]: position ids of the queries, for ALiBi. Float64 stays float64. The result is overwritten by
        the next call.
        """
        r, h, g, _, d = query.shape
        columns = self.slots.positions.shape[2]
        query = query.reshape(r * h, g, d)
        if params.upcast:
            query = query.float()
        if self._logits.shape != (r * h, g, columns) or self._logits.dtype != query.dtype:
            self._make_buffers(query, columns)
        self._queries.copy_(query)
        swapped = query.device.type == "cpu" and d >= SWAP_MIN_HEAD_DIM  # as in `qk_matmul`
        pairs = zip(self._logits_by_pair, self._queries_by_pair, self._keys, self._turned, strict=True)
        for into, pair_query, keys, turned in pairs:
            if swapped:
                into.copy_(torch.mm(keys.to(pair_query.dtype), pair_query.t()).t())
            elif params.upcast:
                into.copy_(torch.mm(pair_query, turned.to(pair_query.dtype)))
            else:
                torch.mm(pair_query, turned, out=into)
        x = self._logits.view(r, h, g, columns)
        x = x.mul_(params.scale) if x.dtype in (torch.float32, torch.float64) else x.float() * params.scale
        if params.softcap is not None:
            behind = x == -torch.inf
            x = softcapped(x, params.softcap).masked_fill_(behind, -torch.inf)
        if params.alibi is not None:
            slopes = params.alibi.view(1, h, g, 1).to(x.device)
            x = x + slopes * (self.slots.positions - newest)[:, :, None].to(torch.float32)
        return x[..., None, :]

    def softmax(self, x: Tensor) -> Tensor:
        """Probabilities [R, H, G, 1, S] of the last call's logits, masked or not; overwritten by the next call."""
        return torch.softmax(x, dim=-1, out=self._probabilities.view(x.shape))

    def output(self) -> Tensor:
        """The values weighted by the last call's probabilities: [R, H, G, 1, Dv], in the dtype of the values.

        What has been multiplied into them in place, such as `token_share`, counts.
        """
        r, h, _ = self.slots.positions.shape
        pairs, groups, _ = self._weights.shape
        if self._weights is not self._probabilities:
            self._weights.copy_(self._probabilities)
        out = self._weights.new_empty(pairs, groups, self._values[0].shape[-1])
        for into, weights, values in zip(out.unbind(0), self._weights_by_pair, self._values, strict=True):
            torch.mm(weights, values, out=into)
        return out.view(r, h, groups, 1, -1)


def _by_pair(buffer: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """Views [G, width] of a buffer [R * H, G, S], one for each pair."""
    return [row[:, :width] for row, width in zip(buffer, widths, strict=True)]
