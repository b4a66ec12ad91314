"""What an eviction method is: its score, its needs, its order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs, AttentionParams, LocalChunks, RoPE, attention_probs
from kvexp.core.budget import floor_share
from kvexp.core.budget_shares import LayerBudgets
from kvexp.core.noise import Noise
from kvexp.core.slots import Slots
from kvexp.core.statistics import QueryCalibration, QueryStatistics
from kvexp.util.errors import ConfigError
from kvexp.util.fields import check_fields


@dataclass(frozen=True)
class SecondPass:
    """How a prompt is repeated: its tokens from position `start` on, `chunk` at a time, each chunk in one forward.

    instruction: text fed ahead of the first chunk; next_instruction: ahead of every later one, followed by the
    `overlap` tokens before the chunk. end_turn: where the tokenizer has a chat template, its end of the user's turn
    stands between instruction and chunk, else a newline. instruction="": chunks are fed behind the `overlap` tokens
    alone, which takes no tokenizer. over_input: each query's attention is divided by the 2-norm of the attention
    layer's input at that query. queries: how many of what is fed, spread over the pass, give their logits over the
    prompt (`EvictionContext.last_logits`); 0: none.
    """

    start: int = 0
    chunk: int = 2000
    overlap: int = 8
    instruction: str = ""
    next_instruction: str = ""
    end_turn: bool = True
    over_input: bool = False
    queries: int = 0

    def __post_init__(self) -> None:
        if self.start < 0 or self.overlap < 0:
            raise ConfigError(f"start and overlap must be at least 0, got {self.start} and {self.overlap}")
        if self.chunk < 1:
            raise ConfigError(f"chunk must be at least 1 token, got {self.chunk}")


@dataclass(frozen=True)
class Needs:
    """The declaration of a method's needs. Caches of a method that declares one take the ordinary decode step.

    newest_attention: the attention of the newest query in each query head (scores are sums over a kv head).
    queries_after: mean and covariance of the prompt's queries before RoPE, in each query head, over the positions from
    this one on; None: not needed. output_norms: the size of every value behind the output projection, in each query
    head. last_queries: the logits of so many newest queries over the slots, each query head by itself; 0: not needed.
    calibration: statistics of the model's queries from a calibration pass (`QueryCalibration`).
    local_chunks: what each token of the prompt gets from the queries of its own chunk, before and behind; None: not
    needed. rope: the model's, with which cached keys are turned back. surrogate: new tokens start with the score that a
    trained `Surrogate` predicts from what the attention layer gets.
    second_pass: the prompt is fed once more before its eviction, and the largest attention of those queries to every
    slot is observed, each query head by itself; None: not needed. output_projection: its blocks for every query head.
    state_changes: how much the hidden state changes from token to token, in layers that are these shares of the model's
    depth (`kvexp.core.statistics.StateChanges`).
    """

    newest_attention: bool = False
    queries_after: int | None = None
    output_norms: bool = False
    last_queries: int = 0
    calibration: bool = False
    local_chunks: LocalChunks | None = None
    rope: bool = False
    surrogate: bool = False
    second_pass: SecondPass | None = None
    output_projection: bool = False
    state_changes: tuple[float, ...] = ()


NOTHING = Needs()


# Field of an EvictionContext -> the `needs` without which it is None.
DECLARED_BY = {
    "newest_attention": "newest_attention=True",
    "query_statistics": "queries_after=0",
    "last_logits": "last_queries=1",
    "calibration": "calibration=True",
    "local_attention": "local_chunks=…",
    "rope": "rope=True",
    "second_pass_attention": "second_pass=…",
    "output_projection": "output_projection=True",
    "state_changes": "state_changes=(…)",
}


def output_norms(values: Tensor, factors: Tensor) -> Tensor:
    """||R v_j||_2 [B, H, G, S] of values [B, H, S, Dv]; factors R [H, G, n, Dv], float32.

    With R of W = QR, the block of the output projection that a query head's output goes through, this is ||W v_j||_2.
    """
    sizes = [torch.linalg.vector_norm(values.float() @ r.transpose(-1, -2), dim=-1) for r in factors.unbind(1)]
    return torch.stack(sizes, dim=2)


def newest_attention(inputs: AttentionInputs, probabilities: Tensor | None, sinks: Tensor | None = None) -> Tensor:
    """The newest query's softmax over all slots [B, H, G, S], 0 for slots that it does not see.

    probabilities [B, H, G, Q, S]: of this forward, if at hand; None: the last query row is computed from `inputs`, with
    these `sinks`.
    """
    if probabilities is not None:
        return probabilities[..., -1, :]
    count = inputs.query.shape[3]
    return attention_probs(inputs.logits(slice(count - 1, count), inputs.keys.shape[2]), sinks)[..., 0, :]


SinkScore = Literal["applied", "renormalised"]
TEMPERED_SINKS = (
    "this model's heads have attention sinks, and no paper says whether a temperature or noise reaches the sink too: "
    "set score.sink=renormalised (the softmax over tokens alone), or take a method without a temperature, such as h2o"
)


@dataclass(frozen=True)
class AttentionScoreSpec:
    """Column sums of a (tempered, noised) softmax over the query rows of a forward:

        S_t(k) = decay^m * S_{t-1}(k) + sum over the m new rows q of decay^(rows after q) * softmax_k((x + zeta) / tau)

    tau        (start, end): prompt rows use start, the j-th decode token start + j * (end - start) / max_new_tokens.
    noise      zeta, None for zero.
    decay      forgetting factor in [0, 1]; 0 remembers the newest row only (0**0 is 1).
    last_rows  only the newest so many prompt rows count (None: all).
    over       softmax over the slots that survive, or (mask mode only) over everything ever seen.
    pool_heads every kv head of a layer gets the layer's sum over heads.
    across_layers  one score by position for the whole model: every layer adds to it and selects from it.
    batch      whose scores are added up: each row's own, all beams' of one sample, or the whole batch's.
    sink       where heads have attention sinks: applied, with the sink's share in the denominator, as values are
               weighted; or renormalised, over tokens alone.
    pool_ahead before a forward's sums are added, each is replaced by the largest of it and the next pool_ahead - 1.
    """

    tau: tuple[float, float] = (1.0, 1.0)
    noise: Noise | None = None
    decay: float = 1.0
    last_rows: int | None = None
    over: Literal["survivors", "full"] = "survivors"
    pool_heads: bool = False
    across_layers: bool = False
    batch: Literal["per_beam", "per_sample", "sum_all"] = "per_beam"
    sink: SinkScore = "applied"
    pool_ahead: int = 1

    def __post_init__(self) -> None:
        if min(self.tau) <= 0:
            raise ConfigError(f"tau must be positive, got tau_init={self.tau[0]:g} tau_end={self.tau[1]:g}")
        if not 0 <= self.decay <= 1:
            raise ConfigError(f"the forgetting factor must be in [0, 1], got {self.decay:g}")
        if self.last_rows is not None and self.last_rows < 1:
            raise ConfigError(f"at least one query row must be observed, got last_rows={self.last_rows}")
        if self.over not in ("survivors", "full"):
            raise ConfigError(f"score_source must be survivors or full, got {self.over!r}")
        if self.batch not in ("per_beam", "per_sample", "sum_all"):
            raise ConfigError(f"score_batch must be per_sample, per_beam or sum_all, got {self.batch!r}")

    def check_lengths(self, prompt_lengths: Sequence[int]) -> None:
        """ConfigError where the scores of rows with prompts of these lengths cannot be added up."""
        if self.batch == "sum_all" and len(set(prompt_lengths)) > 1:
            raise ConfigError("score_batch=sum_all adds up rows column by column: prompts must be of equal length")

    def observed_sinks(self, params: AttentionParams) -> Tensor | None:
        """The sinks of a layer's heads in what is observed; None: none. ConfigError under a temperature or noise."""
        if params.sinks is None or self.sink == "renormalised":
            return None
        if self.tau != (1.0, 1.0) or self.noise is not None:
            raise ConfigError(TEMPERED_SINKS)
        return params.sinks

    @property
    def is_plain(self) -> bool:
        """Whether the observed probabilities are the model's attention itself: tau 1, no noise, over survivors."""
        return self.tau == (1.0, 1.0) and self.noise is None and self.over == "survivors"

    @property
    def sums_key(self) -> AttentionScoreSpec:
        """The fields that decide a prompt's column sums, as a key: methods of equal key share the sums."""
        start = self.tau[0]
        alone = replace(self, tau=(start, start), pool_heads=False, across_layers=False, batch="per_beam")
        return replace(alone, pool_ahead=1)

    def tau_at(self, step: int, max_new_tokens: int | None) -> float:
        """tau of the query row of decode step `step`; 0 is a prompt row. ConfigError past the schedule's end."""
        start, end = self.tau
        if start == end or step == 0:
            return start
        if max_new_tokens is None:
            raise ConfigError("a tau schedule needs max_new_tokens: say how many tokens will be generated")
        if step > max_new_tokens:
            raise ConfigError(
                f"decode step {step} is past max_new_tokens={max_new_tokens}, where the tau schedule ends: "
                "make the cache with the number of tokens that will really be generated"
            )
        return start + step * (end - start) / max_new_tokens

    def taus(self, steps: list[int], max_new_tokens: int | None, device: torch.device) -> Tensor:
        """tau [Q] float32 of query rows at consecutive steps, made on the device so that no copy is waited for."""
        first, last = (self.tau_at(step, max_new_tokens) for step in (steps[0], steps[-1]))
        if first == last:
            return torch.full((len(steps),), first, device=device)
        slope = (last - first) / (len(steps) - 1)
        return first + slope * torch.arange(len(steps), device=device)


@dataclass(frozen=True)
class EvictionContext:
    """What a method may look at when it orders slots: one layer's slots after a forward.

    slots: keys, values, positions, scores; layer: its number; budget [B]: slots per kv head; recent [B]: how many of
    the newest tokens in the cache are protected (one less than the method's window where the budget counts the coming
    token); newest [B]: position id of the newest token; seeds [B]: of the method's own noise. newest_attention
    [B, H, G, S]: the newest query's softmax in each query head; query_statistics: of the prompt; output_factors
    [H, G, n, Dv]: see `output_norms`; last_logits [B, H, G, n, S]: of the newest queries, newest last, -inf where they
    do not look, or of queries of a second pass (`SecondPass.queries`); calibration: of this layer; rope: the model's
    (None: it has none); local_attention [B, H, S]: the sums of `LocalAttention`; second_pass_attention [B, H, G, S]: of
    the queries that repeat the prompt, the largest to every slot, 0 for slots that were not repeated. All are None
    where the method's `needs` do not declare them.
    compares_heads: whether priorities of different kv heads are held against each other, or against one threshold.
    sinks [H * G]: of the heads, to be given to `attention_probs` with `last_logits`; None: none, or left out.
    kept_prompt [B]: how many of the first tokens `keep=prompt` keeps; None: it does not. output_projection
    [H, G, n, Dv]: blocks W of the model's, None where there is no model. state_changes [B, layers asked for, steps]: of
    the tokens generated before this forward, the first one behind the prompt first.
    steps: tokens since the prompt; layers: of the model. nan_flag [] bool: turns True, for good, where a priority of a
    held slot is NaN; None where nobody looks.
    """

    slots: Slots
    layer: int
    budget: Tensor
    recent: Tensor
    newest: Tensor
    seeds: Tensor
    newest_attention: Tensor | None = None
    query_statistics: QueryStatistics | None = None
    output_factors: Tensor | None = None
    last_logits: Tensor | None = None
    calibration: QueryCalibration | None = None
    local_attention: Tensor | None = None
    rope: RoPE | None = None
    second_pass_attention: Tensor | None = None
    compares_heads: bool = False
    sinks: Tensor | None = None
    kept_prompt: Tensor | None = None
    output_projection: Tensor | None = None
    state_changes: Tensor | None = None
    steps: int = 0
    layers: int = 1
    nan_flag: Tensor | None = None

    @property
    def positions(self) -> Tensor:
        """Position ids [B, H, S] int64 of all slots in use, -1 for dead slots."""
        return self.slots.positions[:, :, : self.slots.length]

    @property
    def score(self) -> Tensor:
        """Scores [B, H, S] float32 of all slots in use."""
        return self.slots.score[:, :, : self.slots.length]

    def held(self) -> Tensor:
        """[B, H, S] bool: the slots that hold a token which is not evicted; mask mode leaves evicted ones in place."""
        return (self.positions >= 0) & (self.score > -torch.inf)

    def age(self) -> Tensor:
        """Age [B, H, S] int64 of every slot in tokens: 0 for the newest token, 1 for the one before."""
        return self.newest[:, None, None] - self.positions

    def output_norms(self) -> Tensor:
        """||W v_j||_2 [B, H, G, S] float32: every value's size behind each query head's block of the output projection.

        ConfigError where the cache was made without a model.
        """
        if self.output_factors is None:
            raise ConfigError(
                "the size of projected values needs the model's output projection: declare Needs(output_norms=True) "
                "and make the cache with kvexp.hf.EvictionCache"
            )
        return output_norms(self.slots.values[:, :, : self.slots.length], self.output_factors)

    def just_left_window(self) -> Tensor:
        """[B, H, S] bool: the slot of the token that has just left the recent window."""
        return self.age() == self.recent[:, None, None]


def reads(method: Method, name: str) -> bool:
    """Whether the code of a method's `priority` has an attribute or variable of this name."""
    code = getattr(inspect.unwrap(type(method).priority), "__code__", None)
    return code is not None and name in code.co_names


def needs_heads(method: Method) -> bool:
    """Whether a method looks at keys, values or statistics of heads, which latents have none of.

    Of a user's class also where `initial_score` may look at the keys that it is given.
    """
    beyond_attention = replace(method.needs, newest_attention=False, last_queries=0, second_pass=None) != NOTHING
    scores_keys = is_users(type(method)) and type(method).initial_score is not Method.initial_score
    return method.reads_states or beyond_attention or scores_keys


def undeclared(method: Method, ctx: EvictionContext) -> str | None:
    """Why a method's `priority` met None: the input that it reads and does not declare; None where there is none."""
    names = [name for name in DECLARED_BY if reads(method, name) and getattr(ctx, name) is None]
    if not names:
        return None
    name = type(method).__qualname__
    return f"{name} reads ctx.{names[0]}, which is None: declare needs = Needs({DECLARED_BY[names[0]]})"


@dataclass(frozen=True)
class Method:
    """Base of every eviction method. Subclasses declare a `score_spec`, or override `initial_score` and `priority`.

    keep = sinks U recent window U the slots of highest priority. Fields named `n_sinks`, and `recent_ratio` or
    `protect_recent`, set the first two. `recent` counts the token being generated where the budget does. A method
    remembers nothing: the core accumulates, moves and drops the scores.
    """

    name: ClassVar[str] = ""
    evicts: ClassVar[bool] = True  # False: no slot is ever dropped (the baseline)
    evicts_while_decoding: ClassVar[bool] = True
    is_window: ClassVar[bool] = False  # keeps sinks and the newest tokens in every row and head, and nothing else
    positions: ClassVar[str] = "original"  # the position ids the method's paper gives to survivors
    later: ClassVar[tuple[str, ...]] = ()  # settings newer than recorded runs: no part of identity at their defaults
    needs_whole_prompt: ClassVar[str] = ""  # predicate for messages: what `priority` does with a whole prompt

    def __init_subclass__(cls, **options: Any) -> None:
        """Name the subclass after its class unless it says a `name`."""
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            cls.name = cls.__name__
        names = {base.__name__ for base in cls.__mro__}
        for hook, special in SPECIAL.items() if is_users(cls) else ():
            if hook in vars(cls) and special not in names:
                raise ConfigError(
                    f"{cls.__qualname__}.{hook} is only asked of kvexp.core.{special}: derive the class from that, "
                    "in place of Method"
                )
        for hook in READING if is_users(cls) else ():
            function = getattr(cls, hook, None)
            if inspect.isfunction(function) and not _is_kvexps(function) and not hasattr(function, GUARDED):
                setattr(cls, hook, _guarded(function, f"{cls.__qualname__}.{hook}"))

    def __post_init__(self) -> None:
        """ConfigError for an option outside what its field allows; a subclass that checks more calls this one first."""
        check_fields(self)

    @property
    def score_spec(self) -> AttentionScoreSpec | None:
        """The attention statistic that the core accumulates as score; None: no attention is observed."""
        return None

    @property
    def needs(self) -> Needs:
        """Inputs of `priority` other than keys, values, positions and score; the core computes nothing undeclared."""
        return NOTHING

    @property
    def reads_states(self) -> bool:
        """Whether what is kept depends on keys or values of heads, other than by attention."""
        return False

    @property
    def modifies_prefill(self) -> bool:
        """Whether prompt tokens attend otherwise than in the model, so that no other method can share the prefill."""
        return False

    @property
    def layer_budgets(self) -> LayerBudgets:
        """How the budget is shared out over layers where the configuration does not say (budget.layers=null)."""
        return LayerBudgets()

    @property
    def sinks(self) -> int:
        """How many of the first real tokens are never evicted: the field `n_sinks` of a subclass that has one."""
        return int(getattr(self, "n_sinks", 0))

    def recent(self, budget: int) -> int:
        """How many of the newest tokens are never evicted, for a budget of `budget` slots.

        That is the share `recent_ratio` of the budget, or `protect_recent` tokens, for a subclass with such a field.
        """
        ratio: float | None = getattr(self, "recent_ratio", None)
        return int(getattr(self, "protect_recent", 0)) if ratio is None else floor_share(ratio, budget)

    def initial_score(self, keys: Tensor, positions: Tensor, seeds: Tensor, layer: int) -> Tensor | None:
        """Score [B, H, Q] float32 that new tokens start with; None: 0.

        keys [B, H, Q, D] as cached, RoPE applied; positions [B, Q], -1 for padding; seeds [B] of the method's own
        noise; layer: its number.
        """
        return None

    def priority(self, ctx: EvictionContext) -> Tensor:
        """Priority [B, H, S] float32 of every slot: higher is kept longer.

        The core protects sinks and recent window by itself. NaN for a slot that holds a token is a ConfigError where
        the class is a user's.
        """
        return ctx.score

    @property
    def priority_is_score(self) -> bool:
        """Whether `priority` is the score itself."""
        return type(self).priority is Method.priority

    @property
    def priority_kind(self) -> Literal["score", "share", "log_share", "order"]:
        """Kind of `priority`, for wrappers that weigh priorities (`SlotSelection`) or compare them between heads.

        score: attention added up as the score is, at least 0. share: an attention probability, or made of some, at
        least 0. log_share: its logarithm. order: numbers of which only the order is known.
        """
        return "score" if self.score_spec is not None and self.priority_is_score else "order"

    def threshold_as_priority(self, threshold: float) -> float:
        """What `priority` of a slot must reach where the method's score, as documented, must reach a threshold.

        threshold: `Budget.threshold`. The same number, unless the priority is another function of the score.
        """
        return threshold


# What users' classes do wrong with their inputs and priorities. kvexp's own are tested.

# The hooks that read a cache's tensors.
READING = (
    *("initial_score", "priority", "kept", "rewrite", "after_eviction", "renewed_score"),
    *("hidden_next_step", "query_mask"),
    *("relevance", "select", "build", "extend"),
)
# What `kvexp.core.special_methods` adds to `Method` -> the class.
SPECIAL = {
    **dict.fromkeys(("per_query", "simulation_only", "hidden_next_step", "query_mask"), "Simulated"),
    **dict.fromkeys(("joins_layers", "join_layers"), "JoinsLayers"),
    **{"after_eviction": "ChangesScores", "renewed_score": "RenewsScores"},
    **{"kept": "ChoosesSlots", "effective_budget": "GrantsSlots"},
    **dict.fromkeys(("rewrites", "rewrite"), "Rewrites"),
}
GUARDED = "_kvexp_guarded"  # attribute of a hook that is


def _is_kvexps(named: Any) -> bool:
    """Whether a class or function is defined in kvexp."""
    return str(named.__module__).partition(".")[0] == "kvexp"


def is_users(cls: type[Method]) -> bool:
    """Whether a method's class is somebody else's than kvexp's."""
    return not _is_kvexps(cls)


def _guarded(hook: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The hook, with a ConfigError where it changes a tensor of its arguments in place; name: for the message."""
    parameters = list(inspect.signature(hook).parameters)[1:]

    @wraps(hook)
    def guarded(self: Any, *arguments: Any, **named: Any) -> Any:
        given = {**dict(zip(parameters, arguments, strict=False)), **named}
        watched, before = _watched(given), _state(given)
        returned = hook(self, *arguments, **named)
        after = _state(given)
        for of in watched:
            if after.get(of) != before[of]:
                raise ConfigError(
                    f"{name} changes {of} in place, which the model goes on with: change a copy, as in {of}.clone()"
                )
        return returned

    setattr(guarded, GUARDED, True)
    return guarded


def _watched(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Name -> tensor, of all that a hook is given and must not change."""
    tensors: dict[str, Tensor] = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        for key, attribute in getattr(value, "__dict__", {}).items() if not isinstance(value, Tensor) else ():
            if isinstance(attribute, Tensor):
                tensors[f"{name}.{key}"] = attribute
            elif isinstance(attribute, Slots):
                tensors |= {f"{name}.{key}.{of}": tensor for of, tensor in attribute.buffers.items()}
            elif key == "memory":
                tensors |= {f"{name}.{key}.keys": attribute.keys, f"{name}.{key}.values": attribute.values}
    return tensors


def _state(arguments: Mapping[str, Any]) -> dict[str, tuple[int | None, ...]]:
    """Name -> what differs after a change, of each tensor in `_watched`: which it is, and torch's count of changes.

    That count misses `.data`, NumPy and DLPack: for a prompt, and in simulations by query, the tensor's numbers are
    compared too. In other decode steps nothing is read from a device.
    """
    numbers = any(getattr(value, "steps", None) == 0 for value in arguments.values()) or "probabilities" in arguments
    numbers |= "keys" in arguments and arguments["keys"].shape[2] > 1
    return {
        name: (
            id(tensor),
            None if tensor.is_inference() else tensor._version,
            int(tensor.view(BITS[tensor.element_size()]).sum()) if numbers else None,
        )
        for name, tensor in _watched(arguments).items()
    }


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an element -> whole numbers of it


def nan_error(cls: type[Method], hook: str) -> ConfigError:
    """The error for NaN from a user's hook."""
    return ConfigError(
        f"{cls.__qualname__}.{hook} is NaN for slots that hold a token, which says nothing of which stay: look for "
        "0 / 0, inf - inf, or the log or root of a negative number; -inf is the lowest"
    )


def check_priorities(method: Method, ctx: EvictionContext) -> None:
    """ConfigError where a priority was NaN by the context's flag, and keys and values are finite.

    Waits for the device.
    """
    if ctx.nan_flag is not None and bool(ctx.nan_flag):
        numbers = [buffer for buffer in ctx.slots.kv_buffers if buffer.is_floating_point()]
        if all(bool(buffer.isfinite().all()) for buffer in numbers):  # else the run's end says so
            raise nan_error(type(method), "priority")


def checked(
    made: Tensor, shape: tuple[int, ...] | torch.Size, method: Method, hook: str, axes: str, *, mask: bool = False
) -> Tensor:
    """The tensor that a hook of the method returned; ConfigError where it is no tensor of this shape and dtype.

    A wrong shape could broadcast, and every head or row would then be judged by another's scores. axes: the shape in
    the letters of the docstrings, as in "[B, H, S]". mask: it must be bool.
    """
    if not isinstance(made, Tensor) or made.shape != shape:
        got = f"a tensor of shape {list(made.shape)}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
        raise ConfigError(
            f"{type(method).__qualname__}.{hook} must return a tensor of shape {axes} = {list(shape)}, got {got}"
        )
    if made.is_complex():
        raise ConfigError(f"{type(method).__qualname__}.{hook} must return real numbers, got {made.dtype}")
    if mask and made.dtype != torch.bool:
        raise ConfigError(
            f"{type(method).__qualname__}.{hook} must return a tensor of dtype torch.bool, got {made.dtype}; "
            "compare, as in probabilities > 0.1"
        )
    return made


def recency(ctx: EvictionContext) -> Tensor:
    """Priority [B, H, S] float32 by position: the newest tokens stay."""
    return ctx.positions.to(torch.float32)
