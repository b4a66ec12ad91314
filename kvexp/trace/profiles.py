"""Profiles: how an engine's memory lets tokens be dropped, as backends of the core, watched for a trace.

per_head: every kv head drops its own tokens, and a new token takes the slot of a dropped one. union: the heads of a
layer hold the same tokens. paged: the heads of a layer share a table of pages, which stay or go whole. append_only:
nothing is dropped after the prompt, and new tokens are appended. `trace_check.chosen` says the same rules in numpy.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from kvexp.core import CacheConfig, Cadence
from kvexp.core.eviction_backend import EvictionBackend, Mask
from kvexp.core.resolved_budget import ResolvedBudget
from kvexp.core.slots import Slots
from kvexp.diagnose.watching import held_slots, still_held
from kvexp.errors import ConfigError
from kvexp.trace.trace_check import PROFILES

BLOCK = 16  # tokens of a page, as in vLLM


@dataclass(frozen=True)
class SlotsBefore:
    """One layer's slots as its last eviction found them, [H, C]: position ids (-1: empty), scores, protected, kept."""

    positions: Tensor
    scores: Tensor
    protected: Tensor
    kept: Tensor


class ProfiledEviction(EvictionBackend):
    """The backend `inner` of one layer and row, whose priorities first go through a profile; its evictions are noted.

    noted: of the latest eviction since `take`, None without one.
    """

    def __init__(self, inner: EvictionBackend, profile: str) -> None:
        self.inner, self.profile = inner, profile
        self.noted: SlotsBefore | None = None

    def next_slot(self) -> Tensor | None:
        return self.inner.next_slot()

    def reset_layout(self) -> None:
        self.inner.reset_layout()

    def select_rows(self, rows: Tensor) -> None:
        self.inner.select_rows(rows)

    def evict(
        self,
        slots: Slots,
        priority: Tensor,
        protected: Tensor,
        resolved: ResolvedBudget,
        hidden_next_step: Tensor | None,
    ) -> None:
        held = held_slots(slots)
        positions = slots.positions[:, :, : slots.length].masked_fill(~held, -1)
        shared = priority.masked_fill(~held, -torch.inf)
        if self.profile in ("union", "paged"):  # the heads of a layer hold the same tokens in the same slots
            shared = shared.double().mean(1, keepdim=True).float().expand_as(shared)
        self.inner.evict(slots, shared, protected, resolved, hidden_next_step)
        kept = still_held(slots, positions)
        self.noted = SlotsBefore(positions[0].cpu(), priority[0].float().cpu(), protected[0].cpu(), kept[0].cpu())

    def take(self, slots: Slots) -> SlotsBefore:
        """The slots of the forward that has just ended; where it evicted nothing, what is there and all of it kept."""
        noted, self.noted = self.noted, None
        if noted is not None:
            return noted
        held = held_slots(slots)[0].cpu()
        positions = slots.positions[0, :, : slots.length].cpu().masked_fill(~held, -1)
        return SlotsBefore(positions, slots.score[0, :, : slots.length].cpu(), torch.zeros_like(held), held)


class Paged(Mask):
    """Mode mask with whole pages of BLOCK positions dropped: for one row, its heads of one priority.

    At most keep // BLOCK pages stay, or those with a protected token where they are more; the mean priority of its
    tokens is a page's.
    """

    def evict(
        self,
        slots: Slots,
        priority: Tensor,
        protected: Tensor,
        resolved: ResolvedBudget,
        hidden_next_step: Tensor | None,
    ) -> None:
        held = held_slots(slots)[0, 0]
        page = slots.positions[0, 0, : slots.length] // BLOCK
        order = []
        for number in sorted(set(page[held].tolist())):
            mine = held & (page == number)
            mean = float(priority[0, 0, mine].double().mean().float())
            order.append((not bool(protected[0, 0, mine].any()), -mean, -number))
        needed = sum(not free for free, _, _ in order)
        stay = [-number for _, _, number in sorted(order)[: max(resolved.keep[0] // BLOCK, needed)]]
        keep = held & torch.isin(page, torch.tensor(stay, device=page.device))
        assert slots.visible is not None
        slots.visible[0, :, : slots.length] = keep
        slots.score[0, :, : slots.length].masked_fill_(~keep, -torch.inf)


def profiled(config: CacheConfig, profile: str) -> CacheConfig:
    """The configuration of a cache as the profile needs it; ConfigError for a method that cannot be traced."""
    if profile not in PROFILES:
        raise ConfigError(f"--profile must be one of {', '.join(PROFILES)}, got {profile!r}")
    method = config.method
    if not method.evicts or method.per_query or method.full_cache:
        raise ConfigError(f"method {method.name} evicts nothing: there is no eviction to trace")
    if method.simulation_only or (method.score_spec is not None and method.score_spec.over == "full"):
        raise ConfigError(f"method {method.name} exists as a simulation only, which no engine could follow")
    if config.is_ragged:
        assert config.budget is not None
        remedy = f"{config.budget.heads_remedy}{' or union' if config.budget.threshold is None else ''}"
        raise ConfigError(f"heads with budgets of their own have no profile yet: {remedy}")
    if config.renumbered:
        raise ConfigError("traces are of original positions: set cache.positions=original")
    if profile == "paged":
        return dataclasses.replace(config, mode="mask")
    if profile == "append_only" and method.evicts_while_decoding:
        return dataclasses.replace(config, mode="compact", cadence=Cadence(at_prefill=True, every=None))
    return dataclasses.replace(config, mode="compact" if profile == "append_only" else "overwrite")


def backend_of(inner: EvictionBackend, profile: str) -> ProfiledEviction:
    """The watched backend of one layer; inner: the one that the profile's configuration made."""
    return ProfiledEviction(Paged() if profile == "paged" else inner, profile)
