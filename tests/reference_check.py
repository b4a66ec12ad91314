"""Numbers recorded from the authors' code, compared with kvexp's."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from recordings import Recording
from torch import Tensor

from kvexp.core import (
    AttentionParams,
    Budget,
    CacheConfig,
    Cadence,
    EvictionLayer,
    MemoryTracker,
    Method,
    Noise,
    SequenceState,
)
from kvexp.core.attention import RoPE
from kvexp.core.eviction import CacheState
from kvexp.core.method import AttentionScoreSpec
from kvexp.core.row_mask import (
    MaskFn,
    causal_probs,
    global_mask,
    ideal_mask,
    local_mask,
    local_mask_and_scores,
    masked_probs,
    row_cosine,
    window_mask,
)
from kvexp.generate.prefill import forward_last
from kvexp.hf import EvictionCache, RowMaskCache
from kvexp.methods import A2SF, H2O, H2OC, Keyformer, StreamingLLM
from kvexp.retrieval import InfLLM, Oracle, PQCache, SparQ
from kvexp.retrieval import infllm as infllm_blocks
from kvexp.retrieval.index import CostModel, init_rows
from kvexp.retrieval.layer import LayerGroup, RetrievalLayer
from kvexp.retrieval.method import Retrieval, RetrievalQuery, Selection, reduce_group
from kvexp.retrieval.offload import BlockPolicy
from kvexp.retrieval.pqcache import dots
from kvexp.util.errors import ConfigError

# One line per compared field.


@dataclass
class Report:
    """Results of one file: field -> (passed, what was seen)."""

    lines: list[tuple[str, bool, str]] = field(default_factory=list)
    skipped: set[str] = field(default_factory=set)

    def exact(self, name: str, ours: Any, theirs: Any) -> None:
        """Equal in every element; shapes too."""
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        if self._same_shape(name, ours, theirs):
            wrong = int((ours != theirs).sum())
            self.lines.append((name, wrong == 0, f"{wrong} of {theirs.size} differ"))

    def close(self, name: str, ours: Any, theirs: Any, atol: float = 1e-4, rtol: float = 1e-5) -> None:
        """Within atol + rtol relative wherever `theirs` is a number; elsewhere ours must not be one either."""
        ours, theirs = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
        if not self._same_shape(name, ours, theirs):
            return
        same_gaps = bool((np.isnan(ours) == np.isnan(theirs)).all())
        number = ~np.isnan(theirs)
        error = np.abs(ours - theirs)[number]
        good = same_gaps and bool((error <= atol + rtol * np.abs(theirs[number])).all())
        worst = float(error.max()) if error.size else 0.0
        self.lines.append((name, good, f"max difference {worst:.2g}" + ("" if same_gaps else ", gaps differ")))

    def _same_shape(self, name: str, ours: np.ndarray, theirs: np.ndarray) -> bool:
        """Whether both have one shape; else the field fails."""
        if ours.shape != theirs.shape:
            self.lines.append((name, False, f"shape {ours.shape} instead of {theirs.shape}"))
        return ours.shape == theirs.shape

    def skip(self, name: str, why: str) -> None:
        """A field that was looked at and not compared."""
        self.skipped.add(name)
        self.lines.append((name, True, f"not compared: {why}"))

    @property
    def passed(self) -> bool:
        return len(self.lines) > len(self.skipped) and all(ok for _, ok, _ in self.lines)

    def __str__(self) -> str:
        width = max((len(name) for name, _, _ in self.lines), default=0)
        return "\n".join(f"  {'pass' if ok else 'FAIL'}  {name:<{width}}  {seen}" for name, ok, seen in self.lines)


# Bare q, k, v of some layers, fed to single layers of the core: a prompt at once, then token by token.


@dataclass(frozen=True)
class Streams:
    """q [L, 1, H * G, T, D], k [L, 1, H, T, D], v likewise, of which `prompt` tokens come at once, the rest singly."""

    q: Tensor
    k: Tensor
    v: Tensor
    prompt: int
    rope: RoPE | None = None

    def run(self, config: CacheConfig, seen: Callable[[Any, int], None]) -> np.ndarray:
        """Outputs [L, T, H * G, D] under a configuration; `seen` gets (state, layer) after every forward."""
        outs = []
        params = AttentionParams(self.q.shape[-1] ** -0.5, rope=self.rope)
        for layer in range(self.q.shape[0]):
            time = SequenceState(prompt_columns=self.prompt)
            retrieves = isinstance(config.method, Retrieval)
            state: Any = (
                RetrievalLayer(config, 0, 1, time, MemoryTracker(1), LayerGroup())
                if retrieves
                else EvictionLayer(config, 0, CacheState(config, 1, time))
            )
            out, total = [], self.q.shape[3]
            for rows in (slice(0, self.prompt), *(slice(t, t + 1) for t in range(self.prompt, total))):
                q, k, v = (x[layer, :, :, rows] for x in (self.q, self.k, self.v))
                out.append(state.forward(q, k, v, params, None)[0])
                seen(state, layer)
            outs.append(torch.cat(out, dim=1).transpose(0, 1).float().numpy())
        return np.stack(outs)


def of_tokens(method: Method, tokens: int) -> CacheConfig:
    """A cache of so many slots at original positions."""
    return CacheConfig(method, Budget(tokens=tokens), positions="original")


def streams(archive: Recording, names: str = "q k v") -> Streams:
    """The file's streams; what is recorded before RoPE is rotated here."""
    q, k, v = (archive.tensor(name) for name in names.split())
    if names == "q k v":
        return Streams(q, k, v, int(archive["prompt"]))
    exponent = torch.arange(0, q.shape[-1], 2, dtype=torch.float32) / q.shape[-1]
    rope = RoPE(1.0 / float(archive["rope_base"]) ** exponent, interleaved=False)
    place = torch.arange(q.shape[3]).expand(1, 1, -1)
    q, k = (torch.stack([rope.rotate_by(x, place.expand(1, x.shape[1], -1)) for x in whole]) for whole in (q, k))
    return Streams(q, k, v, int(archive["prompt"]), rope)


# Files with PQCache's baselines: SparQ as run there and as its authors wrote it, H2O with sinks, Oracle.


_TIGHT = 1e-5


@dataclass(frozen=True)
class _RecordedSelections(SparQ):
    """Notes its scores."""

    noted: list[Tensor] = field(default_factory=list, compare=False)

    def approximate(self, asked: RetrievalQuery) -> Tensor:
        dots = super().approximate(asked)
        self.noted.append(asked.logits(dots, past=True).flatten(1, 2)[0])
        return dots


def check(archive: Recording, report: Report) -> None:
    """Choices exactly; weights, scores and outputs within 1e-5."""
    whole = streams(archive)
    for name in sorted({name.rsplit("_", 1)[0] for name in archive if name.startswith("sparq") and "idx" in name}):
        _check_sparq(archive, report, whole, name)
    if "oracle_out" in archive:
        sink, count = int(archive["sink"]), int(archive["oracle_budget"])
        kept: list[np.ndarray] = []
        method = Oracle(n_sinks=sink, recent_ratio=int(archive["oracle_local"]) / count)
        out = whole.run(of_tokens(method, sink + count), lambda state, _: kept.append(_attended(state, whole)))
        _compare(archive, report, "oracle", whole, out, _by_layer(kept, whole))
    if "h2o_out" in archive:
        _check_h2o(archive, report, whole)


def _check_sparq(archive: Recording, report: Report, whole: Streams, name: str) -> None:
    """name: sparq_r<r>_mv<0 or 1>, or that with _official."""
    _, r, mean, *official = name.split("_")
    noted: list[Tensor] = []
    kept: list[np.ndarray] = []
    sink = 0 if official else int(archive["sink"])
    count = int(archive["prompt"] * archive["ratio"])
    method = _RecordedSelections(r=int(r[1:]), mean_value=mean == "mv1", n_sinks=sink, noted=noted)
    out = whole.run(of_tokens(method, sink + count + 1), lambda state, _: kept.append(_attended(state, whole)))
    masks = _by_layer(kept, whole)
    if not official:
        width = whole.q.shape[3]
        table = torch.stack([torch.nn.functional.pad(x, (0, width - x.shape[-1]), value=torch.nan) for x in noted])
        theirs = archive[f"{name}_approx_logits"]
        ours = table.unflatten(0, (len(masks), -1))
        report.close(f"{name}_approx_logits", ours.reshape(theirs.shape).numpy(), theirs)
        steps = np.arange(masks.shape[1]) + whole.prompt
        masks[:, np.arange(len(steps)), :, steps] = False  # the current token is not among those recorded
    theirs = archive[f"{name}_idx"]
    masks = masks.repeat(theirs.shape[2] // masks.shape[2], axis=2)
    report.exact(f"{name}_idx", _indices(masks, theirs.shape), np.sort(theirs, -1))
    report.close(f"{name}_out", out[:, whole.prompt :], archive[f"{name}_out"], _TIGHT)


def _check_h2o(archive: Recording, report: Report, whole: Streams) -> None:
    sink, heavy, recent = (int(archive[name]) for name in ("sink", "h2o_heavy", "h2o_recent"))
    method = H2OC(n_sinks=sink, recent_ratio=recent / (heavy + recent), compensation="none")
    scores: list[np.ndarray] = []
    kept: list[np.ndarray] = []
    total = whole.q.shape[3]

    def note(state: Any, _: int) -> None:
        slots = state.slots
        positions, score = slots.positions[0, :, : slots.length], slots.score[0, :, : slots.length]
        table = torch.zeros(positions.shape[0], total + 1).scatter_(
            1, torch.where(positions < 0, total, positions), score
        )
        scores.append(table[:, :total].numpy())
        mask = np.zeros((positions.shape[0], total), bool)
        for head, held in enumerate(state.kept_positions()[0]):
            mask[head, held] = True
        kept.append(mask)

    out = whole.run(of_tokens(method, sink + heavy + recent + 1), note)
    steps = total - whole.prompt
    masks = np.stack(kept).reshape(-1, steps + 1, *kept[0].shape)[:, :-1]
    masks[:, np.arange(steps), :, np.arange(steps) + whole.prompt] = True
    _compare(archive, report, "h2o", whole, out, masks)
    theirs = archive["h2o_scores"]
    ours = np.stack(scores).reshape(-1, steps + 1, *scores[0].shape)
    report.close("h2o_scores", ours.repeat(theirs.shape[2] // ours.shape[2], axis=2), theirs)


def _compare(archive: Recording, report: Report, name: str, whole: Streams, out: np.ndarray, masks: np.ndarray) -> None:
    """masks [L, steps, H, T]: what each step attended to; the recorded weights are those of the query heads."""
    group = whole.q.shape[2] // whole.k.shape[2]
    seen = torch.from_numpy(masks).repeat_interleave(group, dim=2)
    q, k = whole.q[:, 0, :, whole.prompt :], whole.k[:, 0].repeat_interleave(group, dim=1)
    x = torch.einsum("lhqd,lhkd->lqhk", q, k) * q.shape[-1] ** -0.5
    weights = torch.softmax(x.masked_fill(~seen, -torch.inf), dim=-1)
    theirs = archive[f"{name}_weights"]
    report.exact(f"{name}: attended", seen.numpy(), np.nan_to_num(theirs) > 0)
    report.close(f"{name}_weights", weights.numpy(), np.nan_to_num(theirs), _TIGHT)
    report.close(f"{name}_out", out[:, whole.prompt :], archive[f"{name}_out"], _TIGHT)


def _attended(state: Any, whole: Streams) -> np.ndarray:
    """[H, T] bool: what the newest token attended to."""
    mask = torch.zeros(whole.k.shape[2], whole.q.shape[3] + 1, dtype=torch.bool)
    if state.selection_stats.attended is not None:
        positions = state.selection_stats.attended[0]
        mask.scatter_(1, torch.where(positions < 0, whole.q.shape[3], positions), True)
    return mask[:, :-1].numpy()


def _by_layer(kept: list[np.ndarray], whole: Streams) -> np.ndarray:
    """[L, steps, H, T] of what was noted after every forward, the prompt's left out."""
    return np.stack(kept).reshape(whole.q.shape[0], -1, *kept[0].shape)[:, 1:]


def _indices(masks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Masks [..., T] as ascending indices, -1 where the number is not that of `shape`."""
    result = np.full(shape, -1)
    for place in np.ndindex(*masks.shape[:-1]):
        found = np.flatnonzero(masks[place])
        result[place][: len(found)] = found[: shape[-1]]
    return result


# Keyformer with the noise that was drawn when the numbers were recorded.


@dataclass(frozen=True, eq=False)
class RecordedNoise(Noise):
    """table [L, B, H * G, queries, keys] by column of the padded text; `padding` columns come before position 0.

    by_slot: after a real drop the release draws one number per slot of the shortened cache, in order of position.
    """

    table: Tensor = field(default_factory=lambda: torch.zeros(0))
    padding: int = 0
    by_slot: bool = False

    def make_stepper(self, seeds: Tensor, layers: Sequence[int], heads: int) -> Callable[[Tensor, Tensor], Tensor]:
        def draw(queries: Tensor, keys: Tensor) -> Tensor:
            each = zip(layers, queries.split(len(seeds)), keys.split(len(seeds)), strict=True)
            return torch.cat([self.draw(seeds, layer, heads, query, key) for layer, query, key in each])

        return draw

    def draw(self, seeds: Tensor, layer: int, heads: int, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        rows = torch.arange(query_positions.shape[0])[:, None, None, None]
        head = torch.arange(heads)[None, :, None, None]
        query = query_positions.clamp(min=0)[:, None, :, None] + self.padding
        keys = key_positions.clamp(min=0)
        if self.by_slot:
            last = torch.iinfo(torch.int64).max
            keys = key_positions.masked_fill(key_positions < 0, last).argsort(-1).argsort(-1)
        if keys.shape[1] != 1:
            keys = keys.repeat_interleave(heads // keys.shape[1], dim=1)
        return self.table[layer][rows, head, query, keys[:, :, None, :] + self.padding]


@dataclass(frozen=True, eq=False)
class RecordedKeyformer(Keyformer):
    """Keyformer whose zeta is read from a table."""

    name: ClassVar[str] = "keyformer"
    zeta: RecordedNoise | None = None

    @property
    def score_spec(self) -> AttentionScoreSpec:
        return replace(super().score_spec, noise=self.zeta)


def recorded_noise(archive: Recording, padding: int, *, by_slot: bool) -> RecordedNoise:
    """Prefill draws [L, B, H, T, T] and decode draws [steps, L, B, H, T + steps] as one table."""
    prompt, decode = archive["noise_prefill"], archive["noise_decode"]
    width = prompt.shape[-1]
    total = max(width + decode.shape[0], decode.shape[-1])
    table = np.zeros((*prompt.shape[:3], width + decode.shape[0], total), dtype=np.float32)
    table[..., :width, :width] = prompt
    for step, draw in enumerate(decode):
        table[..., width + step, : draw.shape[-1]] = np.nan_to_num(draw)
    return RecordedNoise(table=torch.from_numpy(table), padding=padding, by_slot=by_slot)


def recorded_keyformer(archive: Recording, padding: int, *, by_slot: bool, frozen: bool) -> RecordedKeyformer:
    """The file's Keyformer; frozen: as released, without its off-by-one mended."""
    c = archive.config
    return RecordedKeyformer(
        recent_ratio=c["recent"] / 100,
        tau_init=c["tau_init"],
        tau_end=c["tau_init"] + int(c["T"]) * c["tau_delta"],
        key_window="release_frozen" if frozen else "paper",
        score_batch="sum_all",
        zeta=recorded_noise(archive, padding, by_slot=by_slot),
    )


# Run a model step by step over recorded tokens and note, after each forward, what the cache holds.


@dataclass
class Trace:
    """Per forward (0: the prompt): logits [B, V]; per layer the slots' positions, score and observed columns.

    kept, score, columns: [forward][layer] -> list over rows of list over heads of {position: value}.
    """

    logits: list[np.ndarray] = field(default_factory=list)
    score: list[list[Any]] = field(default_factory=list)
    kept: list[list[Any]] = field(default_factory=list)
    columns: list[list[Any]] = field(default_factory=list)


class _Tap:
    """Notes the column sums a layer is about to add, by position."""

    def __init__(self, state: EvictionLayer) -> None:
        self.state, self.add = state, state._accumulate
        self.last: list[list[dict[int, float]]] = []

    def __call__(self, slots: Any, spec: Any, sums: Tensor, query_positions: Tensor) -> None:
        self.last = by_position(slots.positions[:, :, : slots.length], sums)
        self.add(slots, spec, sums, query_positions)


def by_position(positions: Tensor, values: Tensor) -> list[list[dict[int, float]]]:
    """[B, H, S] positions and values -> per row and head {position: value}, dead slots left out."""
    return [
        [{p: v for p, v in zip(ps, vs, strict=True) if p >= 0} for ps, vs in zip(row_p, row_v, strict=True)]
        for row_p, row_v in zip(positions.tolist(), values.tolist(), strict=True)
    ]


def tapped(states: Sequence[Any]) -> list[_Tap]:
    """Install a tap on every layer of a fresh cache."""
    taps = [_Tap(state) for state in states]
    for tap in taps:
        tap.state._accumulate = tap  # type: ignore[method-assign]
    return taps


def note(trace: Trace, cache: EvictionCache, taps: list[_Tap]) -> None:
    """Add the state after a forward to the trace."""
    trace.columns.append([tap.last for tap in taps])
    trace.kept.append([state.kept_positions() for state in cache.layer_states])
    slots = [state.slots for state in cache.layer_states]
    trace.score.append(
        [by_position(s.positions[:, :, : s.length], s.score[:, :, : s.length]) for s in slots if s is not None]
    )


@torch.inference_mode()
def teacher_forced(cache: EvictionCache, model: Any, ids: Tensor, mask: Tensor, new_tokens: Tensor) -> Trace:
    """Prompt ids [B, T] with mask, then new_tokens [B, steps + 1] one by one (the last is not fed)."""
    trace, taps = Trace(), tapped(cache.layer_states)
    step = ids
    for j in range(new_tokens.shape[1]):
        trace.logits.append(forward_last(model, step, mask, cache).numpy())
        note(trace, cache, taps)
        step = new_tokens[:, j : j + 1]
        mask = torch.cat([mask, torch.ones_like(step)], dim=1)
    return trace


# Files with a model, a prompt and decode steps: Keyformer's and H2O's releases, dropped for real or by mask.


def setting(archive: Recording) -> tuple[Method, dict[str, Any], tuple[str, ...]]:
    """The method a file was recorded with, how the cache must be set up, and the modes that can reproduce it."""
    c, variant = archive.config, archive.variant
    padding = int(c.get("npad", 0))
    modes: tuple[str, ...] = ("overwrite", "compact", "mask")
    if "heavy_budget" in c:
        k = c["heavy_budget"] + c["recent_budget"]
        method: Method = H2O(recent_ratio=c["recent_budget"] / k, impl="mask", score_batch="per_beam")
        return method, {"budget": Budget(tokens=k)}, ("mask",)
    if "hh_size" in c:
        k = c["hh_size"] + c["recent_size"]
        rolling = {"positions": "renumbered"} if variant.endswith("streaming") else {}
        method = H2O(recent_ratio=c["recent_size"] / k, score_batch="sum_all")
        return method, {"budget": Budget(tokens=k, counts_self=False)} | rolling, modes
    if "stream" in variant:
        budget = Budget(kv_ratio=c["kv_cache"] / 100, of="padded", counts_self=False)
        return StreamingLLM(), {"budget": budget, "positions": "renumbered"}, modes
    if "kv_cache" not in c or "noise_prefill" not in archive:
        fields = ", ".join(list(archive)[:6])
        raise ConfigError(f"{archive.path}: not a recording this script knows (first fields: {fields})")
    steps = int(c["T"])
    real_drop = "bias" in variant
    frozen = not real_drop and not _keeps_leaving_token(archive)
    if real_drop:
        modes = ("overwrite", "compact")  # the recorded noise goes by slot, and mask mode keeps all slots
    method = recorded_keyformer(archive, padding, by_slot=real_drop, frozen=frozen)
    options: dict[str, Any] = {"budget": Budget(kv_ratio=c["kv_cache"] / 100, of="padded", counts_self=not real_drop)}
    options["max_new_tokens"] = steps
    if real_drop:
        options["cadence"] = Cadence(at_prefill=False, every=8)
        options["positions"] = "renumbered" if "new" in variant else "original"
    return method, options, modes


def _keeps_leaving_token(archive: Recording) -> bool:
    """Is this the release with its off-by-one mended ("paperfix")? Then the token that leaves the window may stay."""
    if "paperfix" in archive.path or "paperfix" in archive.variant:
        return True
    width, c = archive["input_ids"].shape[1], archive.config
    window = int(int(width * c["kv_cache"] / 100) * c["recent"] / 100)
    return bool((archive["keep_mask_next"][0][..., width - window] == 1).any())


def generation_check(archive: Recording, report: Report) -> None:
    """Replay the recorded tokens in every mode and compare all fields."""
    method, options, modes = setting(archive)
    model, ids = archive.model(), archive.tensor("input_ids").long()
    padding = int(archive.config.get("npad", 0))
    mask = torch.ones_like(ids)
    mask[:, :padding] = 0
    tokens = archive.tensor("new_tokens").long()
    for mode in modes:
        cache = EvictionCache(model, method, mode=mode, **options)  # type: ignore[arg-type]
        trace = teacher_forced(cache, model, ids, mask, tokens)
        compare(archive, report, trace, mode, ids.shape[1], padding)


def compare(archive: Recording, report: Report, trace: Trace, mode: str, width: int, padding: int) -> None:
    """All fields of one run; columns of the recording are positions + padding."""
    logits = np.stack(trace.logits)
    report.close(f"{mode}: logits", logits, archive["logits"])
    report.exact(f"{mode}: new_tokens", logits.argmax(-1).T, archive["new_tokens"])
    if "tau" in archive:
        c = archive.config
        steps = np.arange(len(trace.logits))
        report.close(f"{mode}: tau", c["tau_init"] + steps * c["tau_delta"], archive["tau"])
    if "slot_orig_pos" in archive:
        _compare_slots(archive, report, trace, mode, width)
        return
    constant = pad_row_mass(archive.kind, width, padding)
    kept = by_column(trace.kept, archive["keep_mask_next"].shape, width, padding, kept=True)
    theirs = archive["keep_mask_next"]
    report.exact(f"{mode}: keep_mask_next", kept, np.where(np.isnan(theirs), -1, theirs))
    name = "score_fn" if "score_fn" in archive else "previous_scores"
    for part, values in ((name, trace.score), ("step_score", trace.columns)):
        if part in archive:
            ours = by_column(values, archive[part].shape, width, padding, kept=False)
            theirs = archive[part].copy()
            if padding:
                # Real keys got the same constant from every padded query row; kvexp gives those rows no weight.
                from_prompt = slice(padding, width)
                lives = theirs[..., from_prompt] != 0
                first = slice(0, 1) if part == "step_score" else slice(None)
                theirs[first, ..., from_prompt] -= constant * lives[first]
                ours[..., :padding] = theirs[..., :padding] = 0
            report.close(f"{mode}: {part}", ours, theirs)


def pad_row_mass(kind: str, width: int, padding: int) -> float:
    """What the release's padded query rows add to the score of every real key, in all."""
    if kind == "gptj":
        return padding / (width - padding)
    if kind == "gpt2":
        return sum(1 / (width - padding + row + 1) for row in range(padding))
    return padding / width


def by_column(states: list[Any], shape: tuple[int, ...], width: int, padding: int, *, kept: bool) -> np.ndarray:
    """[forward, layer, head, column]: values by column, 0 where nothing is; NaN (kept: -1) beyond the text so far."""
    table = np.full(shape, -1.0 if kept else np.nan)
    for step, layers in enumerate(states):
        known = width + step + (1 if kept else 0)
        for layer, rows in enumerate(layers):
            for head, held in enumerate(rows[0]):
                line = np.zeros(shape[-1])
                if kept:
                    line[[p + padding for p in held] + [known - 1]] = 1
                else:
                    for position, value in held.items():
                        line[position + padding] = value if np.isfinite(value) else 0.0
                table[step, layer, head, :known] = line[:known]
    return table


def _compare_slots(archive: Recording, report: Report, trace: Trace, mode: str, width: int) -> None:
    """Real-drop files: what each step attended to, slot by slot in order of position, and the survivors' score."""
    positions: np.ndarray = np.full(archive["slot_orig_pos"].shape, -1)
    for step in range(len(trace.logits)):
        for layer in range(positions.shape[1]):
            for head in range(positions.shape[2]):
                kept = trace.kept[step - 1][layer][0][head] if step else list(range(width - 1))
                line = [*kept, width + step - 1]
                positions[step, layer, head, : len(line)] = line
    report.exact(f"{mode}: slot_orig_pos", positions, archive["slot_orig_pos"])
    lengths = (positions >= 0).sum(-1)[:, :, 0]
    theirs = archive["klen"]
    report.exact(f"{mode}: klen", lengths if theirs.ndim == 2 else lengths[:, 0], theirs)
    rows = len(trace.kept[0][0])
    same = all(row == layers[0] for kept in trace.kept for layers in kept for row in layers)
    report.exact(f"{mode}: one keep set for {rows} rows", same, True)
    for name in ("score_fn", "hh_score"):
        if name in archive:
            score = np.full(archive[name].shape, np.nan)
            for step, layers in enumerate(trace.score):
                for layer, batch in enumerate(layers):
                    for head, held in enumerate(batch[0]):
                        values = [held[p] for p in sorted(held) if np.isfinite(held[p])]
                        score[step, layer, head, : len(values)] = values
            report.close(f"{mode}: {name}", score, archive[name])


# Files with a beam search: the release sums scores over the beams, and all beams share one keep set.


class _Watched(EvictionCache):
    """Notes the state after every forward, and how beams were reordered."""

    def watch(self) -> _Watched:
        self.trace, self.taps, self.beams = Trace(), tapped(self.layer_states), []  # type: ignore[var-annotated]
        return self

    def reorder_cache(self, beam_idx: Tensor) -> None:
        note(self.trace, self, self.taps)
        self.beams.append(beam_idx.tolist())
        super().reorder_cache(beam_idx)


@torch.inference_mode()
def beam_check(archive: Recording, report: Report) -> None:
    """Sequences, their scores, the beam order of every step, logits, scores and masks."""
    c, model = archive.config, archive.model()
    ids, steps = archive.tensor("input_ids").long(), int(c["T"])
    method = recorded_keyformer(archive, 0, by_slot=False, frozen=True)
    for mode in ("overwrite", "compact", "mask"):
        cache = _Watched(
            model,
            method,
            Budget(kv_ratio=c["kv_cache"] / 100),
            mode=mode,
            num_beams=c["num_beams"],
            max_new_tokens=steps,
        ).watch()
        output: Any = model.generate(
            ids,
            past_key_values=cache,
            num_beams=c["num_beams"],
            max_new_tokens=steps,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            early_stopping=True,
            return_dict_in_generate=True,
            output_logits=True,
            output_scores=True,
        )
        width = ids.shape[1]
        report.exact(f"{mode}: sequences", output.sequences.numpy(), archive["sequences"])
        # transformers 4 divided a beam's log-probability by the length with the prompt, 5 divides by the new tokens.
        per_total = output.sequences_scores.numpy() * (output.sequences.shape[1] - width) / output.sequences.shape[1]
        report.close(f"{mode}: sequences_scores", per_total, archive["sequences_scores"])
        report.close(f"{mode}: logits", torch.stack(output.logits).numpy(), archive["logits"])
        # No forward follows the last reordering, and transformers 5 orders finished beams differently there.
        report.exact(f"{mode}: beam_idx", np.asarray(cache.beams[:-1]), archive["beam_idx"][: len(cache.beams) - 1])
        count = len(cache.trace.kept)
        kept = by_column(cache.trace.kept, archive["keep_mask_next"][:count].shape, width, 0, kept=True)
        theirs = archive["keep_mask_next"][:count]
        report.exact(f"{mode}: keep_mask_next", kept, np.where(np.isnan(theirs), -1, theirs))
        score = by_column(cache.trace.score, archive["score_fn"][:count].shape, width, 0, kept=False)
        report.close(f"{mode}: score_fn", score, archive["score_fn"][:count])


# Files with block caches and with PQCache's cap of k-means iterations.


# Seconds of one layer's prefill as a * n^2 + b * n + c, as the two releases hold them, and their shares and bounds.
_RELEASED: dict[str, tuple[tuple[float, ...], float, int]] = {
    "v1": ((5.56006974e-11, 1.60809797e-06, 7.46724923e-03), 0.5, 10),
    "v2_mistral": ((4.86069848e-11, 2.52501805e-06, 5.10610107e-04), 1.0, 300),
    "v2_llama": ((4.75329e-11, 2.53902e-06, 4.22124e-04), 1.0, 300),
}


def check_policies(archive: Recording, report: Report) -> None:
    """Batches of insertions: what was there before each, and which block is where after it."""
    count, limit = int(archive["n_blocks"]), int(archive["limit"])
    for name in ("lfu", "lru"):
        policy = BlockPolicy(name, limit)
        hits, places = [], []
        for batch in archive["batches"].tolist():
            hits.append([int(block in policy.slots) for block in batch])
            for block in batch:
                if block >= 0:
                    policy.insert(block)
            places.append([policy.slots.get(block, -1) for block in range(count)])
        report.exact(f"{name}_hit_before", hits, archive[f"{name}_hit_before"])
        if name == "lfu":
            report.exact("lfu_slot_after", places, archive["lfu_slot_after"])
        else:
            report.exact("lru_resident_after", np.asarray(places) >= 0, archive["lru_resident_after"])


def check_iterations(archive: Recording, report: Report) -> None:
    """The formula with the recorded clustering times and the releases' own layer times."""
    for name, (compute, share, most) in _RELEASED.items():
        if name in archive:
            profile = CostModel(
                compute, tuple(archive["base3_coef"].tolist()), tuple(archive["per_iter_coef"].tolist())
            )
            ours = [profile.iterations(n, share=share, most=most) for n in archive["n_xb"].tolist()]
            report.exact(name, ours, archive[name])


# Files with InfLLM as released: prefill block by block, clamped positions, whole blocks.


class _BlockTap:
    """Notes which blocks every chunk of the prompt chose."""

    def __init__(self) -> None:
        self.real, self.chosen = infllm_blocks.distant_slots, []  # type: ignore[var-annotated]

    def __enter__(self) -> _BlockTap:
        infllm_blocks.distant_slots = self  # type: ignore[assignment]
        return self

    def __exit__(self, *_: Any) -> None:
        infllm_blocks.distant_slots = self.real

    def __call__(self, method: InfLLM, inputs: Any, rows: slice, count: int, *others: Any) -> Tensor:
        found = self.real(method, inputs, rows, count, *others)
        self.chosen.append(_numbers(method, found[0], count))
        return found


def _numbers(method: InfLLM, slots: Tensor, count: int) -> list[list[int]]:
    """Slots [H, N] -> per head the blocks they lie in, of the first `count` ones."""
    rows = []
    for head in slots.tolist():
        inside = {(p - method.n_sinks) // method.block for p in head if p >= method.n_sinks}
        rows.append(sorted(b for b in inside if b < count))
    return rows


def infllm_check(archive: Recording, report: Report) -> None:
    """Both ways of choosing: one for all heads, one per query head."""
    whole = streams(archive, "q_pre_rope k_pre_rope v")
    for prefix, choice in (("perhead0", "shared"), ("perhead1", "query_head")):
        if f"{prefix}_out" in archive:
            _check(archive, report, whole, prefix, choice)


def _check(archive: Recording, report: Report, whole: Streams, prefix: str, choice: str) -> None:
    sinks, size = int(archive["n_init"]), int(archive["block"])
    granted = int((whole.prompt - sinks) * float(archive["ratio"]))
    method = InfLLM(
        n_sinks=sinks,
        recent_ratio=float(archive["local_ratio"]),
        block=size,
        choice=choice,  # type: ignore[arg-type]
        rounding="blocks",
        prefill="blockwise",
        far_positions="clamped",
        chunk=int(archive["exc"]),
        cache_tokens=4 * size,
    )
    chosen: list[list[list[list[int]]]] = [[] for _ in range(whole.q.shape[0])]
    ends: dict[int, Any] = {}

    def note(state: Any, layer: int) -> None:
        ends[layer] = state
        if state.selection_stats.attended is None:
            chosen[layer] += tap.chosen
            tap.chosen = []
            return
        length, local = state.memory.lengths[0], state.memory.config.local[0]
        chosen[layer].append(
            _numbers(method, state.selection_stats.attended[0], max(0, length - 2 - local - sinks) // size)
        )

    with _BlockTap() as tap:
        out = whole.run(of_tokens(method, sinks + granted), note)
    theirs = archive[f"{prefix}_selected_blocks"]
    ours = np.full(theirs.shape, -1)
    for layer, steps in enumerate(chosen):
        for step, heads in enumerate(steps):
            for unit in range(theirs.shape[2]):
                ours[layer, step, unit, : len(heads[unit])] = heads[unit]
    report.exact(f"{prefix}_selected_blocks", ours, theirs)
    report.close(f"{prefix}_out", out, archive[f"{prefix}_out"], _TIGHT)
    local, taken = ends[0].layer_slots.recent[0], ends[0]._num_to_select()[0]
    end = max(0, ends[0].memory.lengths[0] - 1 - local - sinks) // size
    for name, value in (
        ("n_local", local + 1),
        ("topk_blocks", -(-taken // size)),
        ("n_prefill_chunks", sum(len(x) for x in chosen) // len(chosen) - (whole.q.shape[3] - whole.prompt)),
        ("blocks_after_prefill", max(0, whole.prompt - 1 - local - sinks) // size),
        ("blocks_end", end),
    ):
        if f"{prefix}_{name}" in archive:
            report.exact(f"{prefix}_{name}", value, archive[f"{prefix}_{name}"])
    keys = torch.stack([ends[layer].kv_index["repr"][0, :, :end] for layer in sorted(ends)])  # [L, H, n, G, D]
    keys = keys.transpose(2, 3).flatten(1, 2)
    theirs = archive[f"{prefix}_repr_keys_end"]
    if theirs.shape[1] == 1 and keys.shape[1] != 1:
        keys = keys.transpose(1, 2).flatten(2)[:, None]
    report.close(f"{prefix}_repr_keys_end", keys.numpy(), theirs, _TIGHT)


# Files with PQCache's product quantisation: codes, approximate scores, choices and outputs.


@dataclass(frozen=True)
class _Replayed(PQCache):
    """Breaks ties as recorded: tokens with the same codes score the same, and the release leaves those to `topk`.

    A recorded token is preferred to another of the same score and to no other, so a wrong score still shows.
    """

    recorded: np.ndarray | None = None  # [steps, H, N], less the sinks, of the layer in progress
    recorded_exact: np.ndarray | None = None  # the same of the choice by the keys themselves
    first: int = 0  # position of the first step
    total: int = 0  # positions in all
    notes: dict[str, list[Any]] = field(default_factory=dict, compare=False)

    def select(self, asked: RetrievalQuery) -> Selection:
        assert self.recorded is not None
        x = dots(asked.query, asked.index["centroids"], asked.index["codes"][:, :, : asked.memory.length])
        rank = self._ranks(asked, asked.logits(x), self.combine, self.recorded)
        shown = torch.softmax(asked.logits(x), -1).sum(2) if self.combine == "softmax_sum" else x.sum(2)
        exact = self._ranks(asked, asked.exact_logits(), "softmax_sum", self.recorded_exact)
        hidden = ~asked.candidates.expand_as(rank)
        for name, value in (
            ("approx_logits", x.flatten(1, 2).masked_fill(~asked.candidates, torch.nan)),
            ("approx_score", shown.masked_fill(hidden, torch.nan)),
            ("topk_idx", asked.topk(rank) - self.n_sinks),
            ("exact_topk_idx", asked.topk(exact) - self.n_sinks),
        ):
            if name.startswith("approx"):
                value = torch.nn.functional.pad(value, (0, self.total - value.shape[-1]), value=torch.nan)
            self.notes.setdefault(name, []).append(value[0].numpy())
        return Selection(asked.topk(rank))

    def _ranks(self, asked: RetrievalQuery, logits: Tensor, combine: str, recorded: np.ndarray | None) -> Tensor:
        """Relevance [B, H, S] as whole numbers, in which a recorded slot lies before others that are level with it."""
        assert recorded is not None
        relevance = reduce_group(logits, combine)
        theirs = torch.from_numpy(recorded[int(asked.positions[0]) - self.first])[None] + self.n_sinks
        favoured = torch.zeros_like(relevance, dtype=torch.bool).scatter_(-1, theirs, True)
        ranks: Tensor = relevance.float().unique(return_inverse=True)[1]
        return ranks * 2.0 + favoured


def quantised_check(archive: Recording, report: Report) -> None:
    """Every `clean` run: real keys, a window that moves in step. The released run's defects are not reproduced."""
    for prefix in ("clean_fp32", "cleancand_fp32", "cleanraw_fp32"):
        if f"{prefix}_out" in archive:
            _check_pq_run(archive, report, prefix)
    for name in archive:
        if name.startswith("released_"):
            report.skip(name, "the release's defects (rows of an unfilled buffer, layers out of step) are not copied")


def _check_pq_run(archive: Recording, report: Report, prefix: str) -> None:
    whole = streams(archive)
    sink, steps = int(archive["sink"]), int(archive["steps"])
    recent, count = int(archive[f"{prefix}_recent"]), int(archive[f"{prefix}_topk"])
    method = _Replayed(
        n_sinks=sink,
        recent_ratio=recent / (recent + count),
        m=int(archive["m"]),
        b=int(archive["b"]),
        max_iter=int(archive["max_iter"]),
        kmeans_seed=int(archive["km_seed"]),
        cluster="outside_window" if "cand" in prefix else "prompt",
        combine="raw_sum" if "raw" in prefix else "softmax_sum",
        cache_tokens=int(archive["cache_size"]),
        cache_block=int(archive["cache_block"]),
        cache_blocks_per_step=int(archive["cache_topk"]),
        first=whole.prompt,
        total=whole.q.shape[3],
    )
    outs, noted, indexed = [], [], []
    for layer in range(whole.q.shape[0]):
        one = replace(whole, q=whole.q[layer, None], k=whole.k[layer, None], v=whole.v[layer, None])
        chosen, exact = (archive[f"{prefix}_{name}"][layer].astype(np.int64) for name in ("topk_idx", "exact_topk_idx"))
        method = replace(method, recorded=chosen, recorded_exact=exact, notes={})
        ends: list[Any] = []

        def keep(state: Any, _: int, ends: list[Any] = ends) -> None:
            ends.append(state)

        outs.append(one.run(of_tokens(method, sink + recent + count + 1), keep)[0])
        noted.append({name: np.stack(values) for name, values in method.notes.items()})
        indexed.append(ends[-1].kv_index)
    _compare_pq(archive, report, prefix, noted, indexed)
    report.close(f"{prefix}_out", np.stack(outs), archive[f"{prefix}_out"], _TIGHT)  # [L, T, H * G, D]
    clustered = whole.prompt - sink - (recent if "cand" in prefix else 0)
    start = init_rows(clustered, 1 << method.b, method.kmeans_seed)
    report.exact(f"{prefix}_init_idx", start.numpy(), archive[f"{prefix}_init_idx"])
    assert len(noted[0]["topk_idx"]) == steps


def _compare_pq(
    archive: Recording, report: Report, prefix: str, noted: list[dict[str, np.ndarray]], indexed: list[Any]
) -> None:
    total, sink = archive["q"].shape[3], int(archive["sink"])
    for name in ("topk_idx", "exact_topk_idx"):
        report.exact(f"{prefix}_{name}", np.stack([layer[name] for layer in noted]), archive[f"{prefix}_{name}"])
    shared = _mask(np.stack([n["topk_idx"] for n in noted]), total) & _mask(archive[f"{prefix}_exact_topk_idx"], total)
    recall = shared.sum() / np.prod(archive[f"{prefix}_topk_idx"].shape)
    report.close(f"{prefix}_recall", recall, archive[f"{prefix}_recall"], _TIGHT)
    made = [index.notes["kmeans_iterations"][0] for index in indexed]
    report.close(f"{prefix}_km_iters", made, archive[f"{prefix}_km_iters"].reshape(len(made), -1).mean(1))
    for name in ("approx_logits", "approx_score"):
        ours = np.stack([layer[name] for layer in noted])[..., sink:]
        theirs = archive[f"{prefix}_{name}"]
        padded = np.full(theirs.shape, np.nan)
        width = min(ours.shape[-1], theirs.shape[-1])
        padded[..., :width] = ours[..., :width]
        report.close(f"{prefix}_{name}", padded, theirs)
    centroids = np.stack([index["centroids"][0].numpy() for index in indexed])
    report.close(f"{prefix}_centroids", centroids, archive[f"{prefix}_centroids"], _TIGHT)
    codes = np.stack([index["codes"][0].transpose(1, 2).numpy() for index in indexed]).astype(np.int64)
    theirs = archive[f"{prefix}_codes"]
    known = theirs >= 0
    ours = np.full(theirs.shape, -1)
    width = min(codes.shape[-1] - sink, theirs.shape[-1])
    ours[..., :width] = codes[..., sink : sink + width]
    report.exact(f"{prefix}_codes", np.where(known, ours, -1), theirs)


def _mask(ids: np.ndarray, total: int) -> np.ndarray:
    """Index sets [..., N] as a mask [..., total]."""
    mask = np.zeros((*ids.shape[:-1], total), bool)
    np.put_along_axis(mask, ids.astype(np.int64), True, -1)
    return mask


# Files of the row-mask protocol with a model: one forward, one mask per layer and head.


def mask_fn_of(archive: Recording) -> MaskFn:
    """The mask rule of the release a file comes from, with its budgets over the whole text."""
    c, width = archive.config, archive["input_ids"].shape[1]
    if "heavy_ratio" in c:
        heavy, recent = int(c["heavy_ratio"] * width), int(c["recent_ratio"] * width)
        pick = global_mask if "global" in archive.variant else local_mask
        return lambda x, layer: pick(x, heavy, recent)
    budget = int(width * c["kv_cache"] / 100)
    recent = int(budget * c["recent"] / 100)
    heavy = budget - recent
    noise = _noise(archive, heavy)
    return lambda x, layer: local_mask(x, heavy, recent, scores=causal_probs(x, noise[layer], c["tau_init"]))


def _noise(archive: Recording, heavy: int) -> Tensor:
    """[L, B, H, T, T]: one draw for the first `heavy` rows, a fresh one for each later row."""
    return torch.cat((archive.tensor("noise_block")[..., :heavy, :], archive.tensor("noise_rows")), dim=-2)


@torch.inference_mode()
def row_mask_check(archive: Recording, report: Report) -> None:
    """Logits at all positions, and each layer's mask (and attention, where recorded)."""
    model = archive.model()
    ids = archive.tensor("input_ids").long()
    cache = RowMaskCache(model, mask_fn_of(archive))
    logits = model(ids, past_key_values=cache, use_cache=True).logits
    report.close("logits", logits.numpy(), archive["logits"])
    masks = np.stack([state.mask[0].numpy() for state in cache.layer_states if state.mask is not None])
    for name in ("mask", "attended"):
        if name in archive:
            report.exact(name, masks, archive[name])
    if "attn" in archive:
        attention = [state.probabilities[0].numpy() for state in cache.layer_states if state.probabilities is not None]
        report.close("attn", np.stack(attention), archive["attn"])
    if "key_mask" in archive:
        report.skip("key_mask", "the release's working copy of mask before the recent band is added")


# Files that hold bare q, k, v of some layers: A2SF's masks and its decode-time procedures.


_UNIT = 2.0**-10  # between two neighbouring numbers in half precision, relative


def alpha_of(name: str) -> float:
    """A2SF's forgetting factor from a field's name; the first digit stands before the point: a00: 0; hh_a2sf02: 0.2."""
    first, rest = re.fullmatch(r"(?:.*_)?a(?:2sf)?(\d)(\d*)", name).groups()  # type: ignore[union-attr]
    return float(f"{first}.{rest or 0}")


def check_rowmask(archive: Recording, report: Report) -> None:
    """Masks, outputs, accumulators and similarities of the three generations of A2SF's mask.

    A file whose outputs are half was recorded in half, whatever its inputs are stored as; so is what is compared, and
    choices between scores that are equal in half are those recorded.
    """
    half = any(archive[name].dtype == np.float16 for name in archive if name == "q" or name.endswith("_out"))
    dtype = torch.float16 if half else torch.float32
    q, k, v = (archive.tensor(name).to(dtype) for name in "qkv")
    x = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    causal = torch.ones(x.shape[-2:], dtype=torch.bool).tril()
    if "logits" in archive:
        ours, theirs = (y.float().masked_fill(~causal, 0) for y in (x, archive.tensor("logits")))
        report.close("logits", ours, theirs, _UNIT if half else _TIGHT, _UNIT if half else _TIGHT)
        # How a product is rounded to half is the machine's choice and decides near-ties: go on from the recorded ones.
        x = archive.tensor("logits") if half else x
    full = causal_probs(x).to(dtype)

    def like(name: str) -> dict[str, Any]:
        """How the mask of this name was recorded: its dtype, and in half the mask itself, to settle ties by."""
        return {"dtype": dtype, "recorded": archive.tensor(name) if half and name in archive else None}

    _close(report, archive, "probs_full", full)
    budget, share = int(archive["budget"]), int(archive["half_budget"])
    ideals = {
        "gen1_ideal": ideal_mask(x, budget, **like("gen1_ideal_mask")),
        "ideal_llama": ideal_mask(x, budget, force_self=False, **like("ideal_llama_mask")),
    }
    for name, mask in ideals.items():
        _tensors_mask(report, archive, f"{name}_mask", mask)
        _close(report, archive, f"{name}_probs", masked_probs(x, mask).to(dtype))
        _close(report, archive, f"{name}_out", masked_probs(x, mask).to(v.dtype) @ v)
    others = [masked_probs(x, ideals["gen1_ideal"]), full, masked_probs(x, ideals["ideal_llama"])]
    series = {found[1] for field in archive if (found := re.fullmatch(r"gen\d_(.+)_mask", field))}
    for name in sorted(series - {"ideal"}):
        rules = {"h2o": (share, share, 1.0), "local": (0, budget, 1.0)}
        heavy, recent, alpha = rules[name] if name in rules else (budget, 0, alpha_of(name))
        how = like(f"gen1_{name}_mask")
        mask, accumulated = local_mask_and_scores(x, heavy, recent, decay=alpha, **how)
        _tensors_mask(report, archive, f"gen1_{name}_mask", mask)
        _close(report, archive, f"gen1_{name}_acc", accumulated)
        _close(report, archive, f"gen1_{name}_out", masked_probs(x, mask).to(v.dtype) @ v)
        if f"gen1_{name}_cos" in archive:
            ours = _similarity(masked_probs(x, mask).to(dtype), [y.to(dtype) for y in others], budget, name)
            report.close(f"gen1_{name}_cos", ours, archive[f"gen1_{name}_cos"], _UNIT if half else _TIGHT)
        for generation, count_next in (("gen2", True), ("gen3", False)):
            how = like(f"{generation}_{name}_mask")
            mask = evict_one_mask(x, heavy, recent, decay=alpha, count_next=count_next, **how)
            _tensors_mask(report, archive, f"{generation}_{name}_mask", mask)
            _close(report, archive, f"{generation}_{name}_out", masked_probs(x, mask).to(v.dtype) @ v)


def evict_one_mask(
    logits: Tensor,
    heavy: int,
    recent: int,
    *,
    decay: float,
    count_next: bool,
    dtype: torch.dtype,
    recorded: Tensor | None,
) -> Tensor:
    """A2SF's later code, of which kvexp has no method: after each row drop the survivor of least accumulated score.

    With C = heavy + recent, after every row t:  A = decay A + S_t 1[alive] / sum(S_t 1[alive]);  from t = C on drop
    argmin A over the living keys up to t - recent. Every row attends at most C + 1 keys, itself included.

    count_next   (the code between, "gen-2") if recent > 0, start one row earlier and let t + 1 take a place in the
                 recent window: rows attend C keys
    dtype        of the rows S_t and what they are divided by; A is float32. In float16 rows are, as in the release, not
                 divided before something can be evicted, and gen-2's are softmaxes over survivors, rounded once
    recorded     bool [..., n, n], the release's mask: of equal scores, what it holds in the next row stays
    Source: releases of arXiv:2407.20485. Departure: those return all-ones above the diagonal, here it is causal.
    """
    n, lead = logits.shape[-1], int(count_next and recent > 0)
    start, s = heavy + recent - lead, causal_probs(logits).to(dtype)
    mask = window_mask(n, n).expand_as(logits).clone()
    alive, acc = torch.ones_like(mask[..., 0, :]), torch.zeros_like(s[..., 0, :], dtype=torch.float32)
    for t in range(n):
        mask[..., t, :] &= alive
        row = s[..., t, :] * alive
        if count_next and dtype == torch.float16:
            row = masked_probs(logits[..., t, :], mask[..., t, :]).to(dtype)
        elif t >= start or dtype == torch.float32:
            row = row / row.sum(-1, keepdim=True).clamp_min(1e-7 if dtype == torch.float16 else torch.finfo(dtype).tiny)
        acc = decay * acc + row
        if t >= start:
            end = t + 1 - recent + lead
            living = acc[..., :end].masked_fill(~alive[..., :end], torch.inf)
            lowest = living.argmin(-1, keepdim=True)
            if recorded is not None and t + 1 < n:
                higher = living > living.gather(-1, lowest)
                lowest = recorded[..., t + 1, :end].int().masked_fill(higher, 2).argmin(-1, keepdim=True)
            alive = alive.scatter(-1, lowest, torch.zeros_like(lowest, dtype=torch.bool))
    return mask


def _tensors_mask(report: Report, archive: Recording, name: str, ours: Tensor) -> None:
    if name in archive:
        report.exact(name, ours.numpy(), archive[name])


def _close(report: Report, archive: Recording, name: str, ours: Tensor) -> None:
    """To the bit in half precision, where the order of a sum seldom shows; within 1e-5 in float32."""
    if name not in archive:
        return
    if ours.dtype == torch.float16:
        report.exact(name, ours.numpy(), archive[name].astype(np.float16))
    else:
        report.close(name, ours.numpy(), archive[name], _TIGHT)


def _similarity(ours: Tensor, others: list[Tensor], budget: int, name: str) -> Tensor:
    """[layer, 4]: row cosine to ideal, to full, to the other ideal; whole-matrix cosine to full."""
    ours, others = ours.float(), [other.float() for other in others]
    cut = ours * window_mask(ours.shape[-1], budget) if name == "local" else ours
    rows = [row_cosine(cut, other).flatten(1).mean(1) for other in others]
    whole = row_cosine(ours.flatten(-2), others[1].flatten(-2), eps=0.0)
    return torch.stack([*rows, whole.flatten(1).mean(1)], dim=1)


def check_decode(archive: Recording, report: Report) -> None:
    """A2SF's and H2O's decode-time code: `hh_` masks and keeps one key more, `drop_` drops; both via the core."""
    prompt = int(archive["prompt"])
    for prefix in sorted({name.rsplit("_", 1)[0] for name in archive if name.startswith(("hh_", "drop_"))}):
        count = (
            archive[f"{prefix}_kept"].shape[-1]
            if prefix.startswith("drop")
            else int(archive[f"{prefix}_mask"][0, 0, 0].sum()) - 1
        )
        method = _decode_method(archive, prefix, count)
        for mode in ("overwrite", "compact", "mask"):
            budget = Budget(tokens=count, counts_self=False)
            config = CacheConfig(method, budget, mode=mode, positions="original")
            out, kept, score = _run(streams(archive), config)
            report.close(f"{mode}: {prefix}_out", out, archive[f"{prefix}_out"], _TIGHT)
            if prefix.startswith("drop"):
                report.exact(f"{mode}: {prefix}_kept", kept, archive[f"{prefix}_kept"])
                report.close(f"{mode}: {prefix}_score", score, archive[f"{prefix}_score"], _TIGHT)
                continue
            mask: np.ndarray = np.zeros(archive[f"{prefix}_mask"].shape, bool)
            dense = np.zeros(archive[f"{prefix}_score"].shape)
            np.put_along_axis(dense, kept, score, -1)
            for step in range(mask.shape[1]):
                np.put_along_axis(mask[:, step], kept[:, step], True, -1)
                mask[:, step, :, prompt + step] = True
            report.exact(f"{mode}: {prefix}_mask", mask, archive[f"{prefix}_mask"])
            report.close(f"{mode}: {prefix}_score", dense, archive[f"{prefix}_score"], _TIGHT)


def _decode_method(archive: Recording, prefix: str, count: int) -> Method:
    if "h2o" in prefix:
        return H2O(recent_ratio=0.5)
    # The mask variant protects the token just fed; the dropping one protects nobody unless its name says how many.
    name, _, protected = prefix.partition("_r")
    protect = int(protected) if protected else (1 if prefix.startswith("hh") else 0)
    return A2SF(alpha=alpha_of(name), protect_recent=protect)


def _run(whole: Streams, config: CacheConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every layer's prompt and decode steps: out [L, T, H, D]; kept ids and scores [L, steps + 1, H, N]."""
    kept: list[list[list[int]]] = []
    score: list[list[list[float]]] = []

    def note(state: Any, _: int) -> None:
        slots, held = state.slots, state.kept_positions()[0]
        (table,) = by_position(slots.positions[:, :, : slots.length], slots.score[:, :, : slots.length])
        kept.append(held)
        score.append([[table[h][p] for p in ids] for h, ids in enumerate(held)])

    out = whole.run(config, note)
    return out, *(np.asarray(one).reshape(len(out), -1, *np.shape(one)[1:]) for one in (kept, score))  # type: ignore[return-value]


def check_head(archive: Recording, report: Report) -> None:
    """The 2026 code with grouped heads: scores summed over a query group, top of them plus the newest, prefill only."""
    names = [name[: -len("_scores")] for name in archive if name.endswith("_scores")]
    q, k, v = (archive.tensor(name) for name in "qkv")
    recent = int(archive["recent"])
    for name in names:
        theirs, selected = archive[f"{name}_scores"], archive[f"{name}_selected"]
        chosen = _mask(selected, q.shape[3])
        budget = int(chosen.sum(-1).max())
        config = CacheConfig(
            A2SF(alpha=alpha_of(name), protect_recent=recent),
            Budget(tokens=budget, counts_self=False),
            Cadence(every=None),
            mode="mask",
        )
        score, kept, out = [], [], []
        for layer in range(q.shape[0]):
            state = EvictionLayer(config, 0, CacheState(config, 1, SequenceState()))
            (tap,) = tapped([state])
            out.append(state.forward(q[layer], k[layer], v[layer], AttentionParams(q.shape[-1] ** -0.5), None)[0])
            score.append(np.array([list(held.values()) for held in tap.last[0]]))
            line = np.zeros(score[-1].shape, bool)
            for head, ids in enumerate(state.kept_positions()[0]):
                line[head, ids] = True
            kept.append(line)
        report.close(f"{name}_scores", np.stack(score).reshape(theirs.shape), theirs)
        report.exact(f"{name}_selected", np.stack(kept).reshape(chosen.shape), chosen)
    report.close("out", torch.stack(out).numpy(), archive["out"][:, 0])


# Which check fits a file, by its fields.


def run(path: str) -> Report:
    """Compare one recording; ConfigError where it is of no known kind."""
    archive, report = Recording(path), Report()
    if "gen1_ideal_mask" in archive:
        check_rowmask(archive, report)
    elif any(name.startswith(("hh_", "drop_")) and name.endswith("_out") for name in archive):
        check_decode(archive, report)
    elif any(name.endswith("_selected") for name in archive):
        check_head(archive, report)
    elif "km_seed" in archive:
        quantised_check(archive, report)
    elif "oracle_out" in archive:
        check(archive, report)
    elif "q_pre_rope" in archive:
        infllm_check(archive, report)
    elif "lfu_slot_after" in archive:
        check_policies(archive, report)
    elif "n_xb" in archive:
        check_iterations(archive, report)
    elif "beam_idx" in archive:
        beam_check(archive, report)
    elif "lmeval" in archive.variant or "lm_eval" in archive.variant:
        row_mask_check(archive, report)
    elif "new_tokens" in archive:
        generation_check(archive, report)
    else:
        raise ConfigError(f"{path}: not a recording this script knows (first fields: {', '.join(list(archive)[:6])})")
    for name in sorted(set(archive) - archive.read - report.skipped):
        report.skip(name, "neither an input nor a result of this comparison")
    return report


def main(paths: list[str]) -> int:
    """Print the report on every file; exit code 0 if all of them pass."""
    reports = {path: run(path) for path in paths}
    for path, report in reports.items():
        print(f"{path}\n{report}")
    return int(not all(report.passed for report in reports.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
