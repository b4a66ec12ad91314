"""Decode steps as a CUDA graph: captured once caches that evict are full, checked against an eager step, replayed.

Most of an eager step of a small batch goes to launching kernels; a graph launches all of a step's at once. Nothing is
captured that `kvexp.core.graph` refuses, and the first replay is compared with the step that it stands for: only equal
numbers are trusted. What cannot be captured is computed without a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvexp.core.graph import ReplayableStep, capture_obstacle, evicting
from kvexp.generate.prefill import decode_step
from kvexp.hf import EvictionCache, MultiMethodCache
from kvexp.hf.attach import track_finite
from kvexp.hf.moving_rope import MovingRope
from kvexp.hf.traits import traits_of

AnyCache = EvictionCache | MultiMethodCache


class GraphDevice(Protocol):
    """What captures a step; `CudaGraphs`, or a stand-in of tests."""

    def warm_up(self, step: Callable[[], Tensor]) -> Tensor:
        """Compute the step where captured ones are computed, so that libraries have set up what they need."""

    def capture(self, step: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """The step's output, not computed yet, and a function that computes it; RuntimeError where it cannot be."""


class CudaGraphs:
    """Captures by `torch.cuda.CUDAGraph`, on the CUDA device `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def warm_up(self, step: Callable[[], Tensor]) -> Tensor:
        """Compute the step on a side stream, as torch asks for."""
        side, current = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            output = step()
        current.wait_stream(side)
        return output

    def capture(self, step: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Capture the step, as `GraphDevice.capture`; other threads may go on using the device."""
        with torch.cuda.device(self.device):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                output = step()
        return output, graph.replay


@dataclass
class GraphCounts:
    """What became of the decode steps of one call: how many there were and were replayed, and why others were not.

    asked: whether steps were to be captured at all.
    """

    asked: bool = False
    steps: int = 0
    replayed: int = 0
    reasons: list[str] = field(default_factory=list)

    def because(self, reason: str) -> None:
        """Note why steps are not replayed, once."""
        if reason not in self.reasons:
            self.reasons.append(reason)

    @property
    def note(self) -> str | None:
        """What a run's row says of them; None where nothing was to be captured."""
        counted = f"{self.replayed} of {self.steps} decode steps were replayed from a CUDA graph"
        return "; ".join([counted, *self.reasons]) if self.asked else None


def graph_device(cache: AnyCache) -> GraphDevice | None:
    """What captures steps of this cache: CUDA graphs where cache.graph=auto and the model is on CUDA; else None."""
    caches = _caches(cache)
    tokens = caches[0].sequence.num_real
    captures = all(member.config.graph == "auto" for member in caches) and torch.cuda.is_available()
    return CudaGraphs(tokens.device) if captures and tokens is not None and tokens.device.type == "cuda" else None


class DecodeSteps:
    """The decode steps of a cache, or of several that decode together: eager, or captured and replayed.

    counts: of the call, which may have several such objects in turn.
    """

    def __init__(self, model: PreTrainedModel, cache: AnyCache, counts: GraphCounts) -> None:
        self.model, self.cache, self.counts = model, cache, counts
        device = graph_device(cache)
        counts.asked |= device is not None
        obstacles = [] if device is None else [(member, capture_obstacle(member.config)) for member in _caches(cache)]
        for member, why in obstacles:
            if why is not None:
                counts.because(f"{member.config.method.name} is not captured: {why}")
        if device is not None and MovingRope.of(model.config) is not None:
            counts.because("the model's RoPE is not captured: its frequencies go by a position that the host reads")
            device = None
        if device is not None and traits_of(model.config).composed:
            counts.because("layers that keep windows or states are not captured")
            device = None
        self._device = device if all(why is None for _, why in obstacles) else None
        self._captured: dict[tuple[bool, ...], _CapturedStep] = {}  # by which stacks evict
        self._before: list[tuple[int, bool]] | None = None  # stacks of the step before, and whether they were merged

    def __call__(self, token: Tensor, positions: Tensor) -> Tensor:
        """Logits [R, V] after one real token per row, as `decode_step`: token, positions [R, 1]."""
        self.counts.steps += 1
        if self._device is None:
            return decode_step(self.model, token, positions, self.cache)
        stacks = self._stacks()
        self._captured = {
            kind: captured for kind, captured in self._captured.items() if captured.step.is_current(stacks)
        }
        captured = None if stacks is None else self._captured.get(evicting(stacks))
        if captured is None and stacks is not None and self._is_settled(stacks):
            return self._capture(self._device, stacks, token, positions)
        if captured is None:
            return decode_step(self.model, token, positions, self.cache)
        if not captured.trusted:
            output = captured.check(token, positions)
            if not captured.trusted:
                self._device, self._captured = None, {}
                self.counts.because("a replayed step differed from the same step without a graph, which was kept")
            return output
        self.counts.replayed += 1
        return captured.replay(token, positions)

    def _stacks(self) -> list[list[Any]] | None:
        """Per layer, the stacks that take the next step; None where a layer takes another step."""
        held: list[Any] = [*self.cache.layer_states]
        stacks = [state.decode_stacks for state in held]
        return None if any(stack is None for stack in stacks) else stacks

    def _is_settled(self, stacks: list[list[Any]]) -> bool:
        """Whether the last step was taken by the same stacks with the same buffers as the next one will be."""
        now = [(id(stack), stack.buffers.merged) for layer in stacks for stack in layer]
        settled, self._before = now == self._before, now
        return settled

    def _capture(self, device: GraphDevice, stacks: list[list[Any]], token: Tensor, positions: Tensor) -> Tensor:
        """Compute a step, and capture it for the next ones."""
        layers: list[list[Any]] = [[*member.layer_states] for member in _caches(self.cache)]
        if len({stack.keys.device for layer in stacks for stack in layer}) > 1:
            self._device = None
            self.counts.because("the layers are on several devices")
            return decode_step(self.model, token, positions, self.cache)
        captured = _CapturedStep(self.model, self.cache, ReplayableStep(layers, stacks), token, positions)
        output, failure = captured.make(device)
        if failure is None:
            self._captured[captured.step.evicts] = captured
        else:
            self._device = None
            self.counts.because(f"the capture failed: {failure}")
        return output


class _CapturedStep:
    """One captured step. trusted: whether a replay was compared with an eager step and found equal."""

    def __init__(
        self, model: PreTrainedModel, cache: AnyCache, step: ReplayableStep, token: Tensor, positions: Tensor
    ) -> None:
        self.model, self.cache, self.step = model, cache, step
        self.trusted = False
        self._token, self._positions = token.clone(), positions.clone()  # where the graph reads its inputs
        self._output: Tensor | None = None
        self._replay: Callable[[], None] = lambda: None

    def _eager(self) -> Tensor:
        return decode_step(self.model, self._token, self._positions, self.cache)

    def make(self, device: GraphDevice) -> tuple[Tensor, str | None]:
        """Compute the step, then capture it: its logits [R, V], and why the capture failed, if it did."""
        self.step.begin()
        output, failure = device.warm_up(self._eager), None
        flags = [member.logits_nan_flag for member in _caches(self.cache)]
        self.step.rewind()
        try:
            self._output, self._replay = device.capture(self._eager)
        except RuntimeError as error:
            failure = str(error).strip().partition("\n")[0] or type(error).__name__
            self.step.rewind()
            self.step.count()
        for member, flag in zip(_caches(self.cache), flags, strict=True):
            member.logits_nan_flag = flag  # the captured one is of no step
        self.step.release()
        return output, failure

    def check(self, token: Tensor, positions: Tensor) -> Tensor:
        """Replay a step, undo it and compute it without the graph; sets `trusted` and returns the latter's logits."""
        self._begin(token, positions)
        state = self.step.bookkeeping()
        before = [x.clone() for x in state]
        self._replay()
        assert self._output is not None
        replayed = [x.clone() for x in (self._output, *state, *self.step.written())]
        for tensor, saved in zip(state, before, strict=True):
            tensor.copy_(saved)
        output = self._eager()
        computed = [output, *state, *self.step.written()]
        self.trusted = all(torch.equal(a, b) for a, b in zip(replayed, computed, strict=True))
        self.step.release()
        return output

    def replay(self, token: Tensor, positions: Tensor) -> Tensor:
        """The logits [R, V] of a step, a copy that the next replay leaves alone."""
        self._begin(token, positions)
        self._replay()
        self.step.count()
        self.step.release()
        assert self._output is not None
        output = self._output.clone()
        track_finite(self.cache, output)
        return output

    def _begin(self, token: Tensor, positions: Tensor) -> None:
        self._token.copy_(token)
        self._positions.copy_(positions)
        self.step.begin()


def _caches(cache: AnyCache) -> list[EvictionCache]:
    """The cache, or the caches that decode together."""
    return cache.caches if isinstance(cache, MultiMethodCache) else [cache]
