"""One layer's cache under a retrieval method: keep everything, attend to sinks, window and what the method chooses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs, AttentionParams
from kvexp.core.cache_config import CacheConfig
from kvexp.core.eviction_backend import ResolvedBudget
from kvexp.core.memory_tracker import MemoryTracker
from kvexp.core.sequence import SequenceState
from kvexp.core.slots import Slots
from kvexp.errors import CacheError, ConfigError
from kvexp.retrieval.background import Later
from kvexp.retrieval.base import PrefillKV, Retrieval, left_aligned
from kvexp.retrieval.kv_index import Index
from kvexp.retrieval.offload import Memory
from kvexp.retrieval.offload_config import Layout
from kvexp.retrieval.query import Chosen, RetrievalQuery
from kvexp.retrieval.selection_stats import Tally


@dataclass
class LayerGroup:
    """What the layers of a cache share: one another, so that each can prefetch for the next, and `prepared`."""

    prepared: Any = None
    states: list[RetrievalState] = field(default_factory=list)


class RetrievalState:
    """A `RowsCache`. Batch rows are independent, and slot = position in each of them."""

    def __init__(
        self,
        config: CacheConfig,
        index: int,
        layers: int,
        timeline: SequenceState,
        ledger: MemoryTracker,
        crew: LayerGroup,
    ) -> None:
        self.config, self.index, self.layers = config, index, layers
        self.timeline, self.ledger, self.crew = timeline, ledger, crew
        crew.states.append(self)
        self.reset()

    @property
    def method(self) -> Retrieval:
        assert isinstance(self.config.method, Retrieval)
        return self.config.method

    def reset(self) -> None:
        """Forget everything; the next forward starts a prompt."""
        self.slots: Slots | None = None  # the prompt, until it ends
        self.memory: Memory | None = None
        self.known: Index | None = Index()
        self.quota: ResolvedBudget | None = None
        self.tally: Tally | None = None
        self.columns = 0
        self.first_eviction: list[int | None] = []  # per row: decode tokens seen when one was first left out
        self.building: Later | None = None
        self.ledger.set(self.index, 0)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, geometry: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """As `LayerCache.forward`."""
        time, groups = self.timeline, query.shape[1] // key.shape[1]
        positions = time.join(self.columns, key.shape[0], key.shape[2], padding, key.device, self.layers)
        self.columns = time.end
        if self.method.ungrouped and groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        query = query.unflatten(1, (key.shape[1], -1))
        if time.in_prompt:
            out = self._prompt(query, key, value, geometry, positions)
        else:
            if self.index == 0 and padding is not None and not bool(padding[:, -key.shape[2] :].all()):
                raise CacheError("a new token is masked out: every row takes a real token at every step")
            tokens = (x.split(1, dim=-2) for x in (query, key, value))
            steps = zip(*tokens, positions.split(1, dim=1), strict=True)
            out = torch.cat([self._step(q, k, v, geometry, p) for q, k, v, p in steps], dim=3)
        self._report()
        time.arrive()
        return out.flatten(1, 2)

    def _report(self) -> None:
        if self.memory is None or self.known is None:
            assert self.slots is not None
            self.ledger.set(self.index, self.slots.kv_bytes, self.slots.take_peak_bytes())
            return
        near = self.memory.near_bytes + self.indexed.nbytes(ship=False)
        far = self.memory.home_bytes + self.indexed.nbytes(ship=True)
        away = self.method.offload
        self.ledger.set(self.index, near if away else near + far)
        self.ledger.note(self.index, offloaded=far if away else 0)

    # -- the prompt ---------------------------------------------------------------------------------------------------

    def _prompt(
        self, query: Tensor, key: Tensor, value: Tensor, geometry: AttentionParams, positions: Tensor
    ) -> Tensor:
        time, method = self.timeline, self.method
        if self.slots is None:
            if method.whole_prompt and not time.prompt_complete:
                raise ConfigError(
                    f"{method.name} reads a prompt in one forward: leave generation.prefill_chunk at null"
                )
            self.slots = Slots.like(key, value, masked=False)
        slots = self.slots
        slots.append(key, value, positions, torch.zeros(key.shape[:3], device=key.device))
        sight = AttentionInputs(
            query=query,
            keys=slots.keys[:, :, : slots.used],
            values=slots.values[:, :, : slots.used],
            positions=slots.seen_positions(),
            query_positions=positions,
            geometry=geometry,
            in_order=True,
            padded=time.padded or not time.prompt_complete,
        )
        assert self.known is not None
        if not time.prompt_complete:
            return method.attend_prompt(sight, self.known, [], [])
        assert time.prompt_columns is not None
        lengths, new = list(time.prompt_lengths), time.max_new_tokens
        self.quota = ResolvedBudget.resolved(
            self.config, lengths, time.prompt_columns, new, self.index, self.layers, key.device
        )
        out = method.attend_prompt(sight, self.known, self.quota.recent, self._at_most())
        self._close(sight, lengths)
        return out

    def _at_most(self) -> list[int]:
        """How many slots the method may choose, per row."""
        assert self.quota is not None
        pairs = zip(self.quota.kept, self.quota.recent, strict=True)
        return [max(0, kept - recent - self.method.n_sinks) for kept, recent in pairs]

    def _close(self, sight: AttentionInputs, lengths: list[int]) -> None:
        """The prompt has ended: send it home and index it."""
        time, method = self.timeline, self.method
        assert self.quota is not None and self.slots is not None and self.known is not None
        room = max(lengths) + (time.max_new_tokens or 0)
        layout = Layout(method.n_sinks, self.quota.recent, room, method.offload, method.cache)
        memory = Memory(sight.keys, sight.values, lengths, layout)
        self.ledger.set(self.index, memory.near_bytes, memory.near_bytes + self.slots.kv_bytes)
        self.memory, self.slots, self.tally = memory, None, Tally(len(lengths))
        at_home = method.builds_on_host
        prompt = PrefillKV(
            keys=memory.keys if at_home else left_aligned(sight.keys, lengths),
            values=memory.values if at_home else left_aligned(sight.values, lengths),
            lengths=lengths,
            local=self.quota.recent,
            room=memory.keys.shape[2],
            home=memory.keys.device if method.offload else None,
            device=memory.device,
            geometry=sight.geometry,
            samples=time.num_beams,
            prepared=self.crew.prepared,
        )
        known, known.lanes = self.known, memory.lanes

        def build() -> None:
            if at_home:
                memory.settle()
            method.build(known, prompt)

        # On a CPU it waits for the first new token, so that the time to the first is that of the prompt alone.
        self.building = Later(build, beside=at_home and memory.apart)
        if not at_home:
            self.building.wait()

    # -- new tokens ---------------------------------------------------------------------------------------------------

    def _step(self, query: Tensor, key: Tensor, value: Tensor, geometry: AttentionParams, positions: Tensor) -> Tensor:
        """One new token: query [B, H, G, 1, D], key [B, H, 1, D], positions [B, 1] -> [B, H, G, 1, Dv]."""
        memory, method, known = self.memory, self.method, self.ready()
        assert memory is not None and known is not None and self.quota is not None and self.tally is not None
        following = self.crew.states[(self.index + 1) % self.layers]
        if following.building is not None and following.building.done and following.known is not None:
            following.known.prefetch()
        at = list(memory.lengths)
        memory.add(key, value)
        method.extend(known, key[:, :, 0], value[:, :, 0], at)
        asked = RetrievalQuery.of(query[..., 0, :], positions[:, 0], self._at_most(), known, memory, geometry)
        everything = asked.everything()
        chosen = method.select(asked) if everything is None else Chosen(everything)
        sight = self._sight(query, positions, geometry, chosen.slots)
        out = method.attend(sight, asked, chosen)
        self.tally.note(sight, asked, method.n_sinks, out)
        self.first_eviction = self.timeline.note_losses(self.first_eviction, [k + 1 for k in self.quota.kept])
        return out

    def _sight(self, query: Tensor, positions: Tensor, geometry: AttentionParams, slots: Tensor) -> AttentionInputs:
        assert self.memory is not None
        first, last = self.memory.near.read(self.memory.lengths)
        middle = (*self.memory.fetch(slots), slots)
        places = [p if p.ndim == 3 else p[:, None].expand(-1, slots.shape[1], -1) for *_, p in (first, middle, last)]
        return AttentionInputs(
            query=query,
            keys=torch.cat([first[0], middle[0], last[0]], dim=2),
            values=torch.cat([first[1], middle[1], last[1]], dim=2),
            positions=torch.cat(places, dim=2),
            query_positions=positions,
            geometry=geometry,
        )

    @property
    def indexed(self) -> Index:
        """What can be counted: nothing while another thread may still be at it, so that counts are always the same."""
        return self.known if self.known and (self.building is None or self.building.waited_for) else Index()

    def ready(self) -> Index | None:
        """The index, once it is built."""
        if self.building is not None:
            self.building.wait()
        return self.known

    # -- rows ---------------------------------------------------------------------------------------------------------

    @property
    def large(self) -> list[Any]:
        """What a copy of the whole cache leaves out and `take_over` brings."""
        self.ready()
        return [self.slots, self.memory, self.known]

    def take_over(self, other: RetrievalState, rows: Tensor) -> None:
        """Go on from these rows of another state, which stays as it is."""
        self.slots = other.slots.picked(rows) if other.slots is not None else None
        self.memory = other.memory.picked(rows) if other.memory is not None else None
        self.known = other.known.picked(rows) if other.known is not None else None
        self._report()

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Keep, repeat or reorder batch rows: tokens, index and bookkeeping together."""
        chosen = rows.tolist()
        if self.slots is not None:
            self.slots.select_rows(rows)
        if self.memory is not None and self.known is not None and chosen != list(range(len(self.memory.lengths))):
            self.ready()
            self.memory, self.known = self.memory.picked(rows), self.known.picked(rows)
            self._report()
        if self.quota is not None:
            self.quota.select_rows(rows, same_prompts=same_prompts)
        if self.tally is not None:
            self.tally.select_rows(rows, same_prompts=same_prompts)
        if not same_prompts:
            self.first_eviction = [self.first_eviction[i] for i in chosen] if self.first_eviction else []

    @property
    def attention_kept(self) -> Tensor | None:
        """[B], see Tally."""
        return self.tally.kept if self.tally is not None else None

    def kept(self, rows: slice = slice(None)) -> list[list[list[int]]]:
        """Position ids the newest token attended to, per batch row and kv head, ascending; before there is one, all."""
        if self.memory is None or self.tally is None:
            raise CacheError("this layer has not seen a prompt yet")
        return self.tally.positions(self.memory)[rows]
