"""What a forward must at least read and compute, and how long a machine then takes: a prediction, no measurement.

`Speeds` are what eager code reaches: operations per second of three kinds of products, bytes per second, and seconds
per layer of Python and launches. A forward takes the longer of its operations and its bytes, plus that time of every
layer. Left out: what cannot be told from shapes (page faults, copies of beams, how often the logits of an observed
prompt go through memory, a method's bookkeeping beyond the bytes of its scores).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.floor import slot_bytes, weight_bytes
from benchmarks.shapes import SHAPES
from benchmarks.variants import Variant
from kvexp.run.plan import Machine

SCORED = ("h2o", "keyformer", "keyformer_quiet", "a2sf")  # methods that read every slot's attention at every step
FLOAT = 4  # bytes of a score or a logit
# Of a prompt A2SF observes its last queries: one that n tokens follow weighs 0.1**n, in float32 0 from here on.
A2SF_QUERIES = 46


@dataclass(frozen=True)
class Speeds:
    """What a machine reaches in eager code.

    linear, attention, observation: operations per second of linear layers, of attention, and of the products that a
    method computes once more to observe a prompt; bandwidth: bytes per second; layer_s: seconds per layer and forward
    of Python and launches.
    """

    linear: float
    attention: float
    observation: float
    bandwidth: float
    layer_s: float

    @classmethod
    def of(cls, machine: Machine) -> Speeds:
        """All products at the one rate that plans take."""
        return cls(machine.flops, machine.flops, machine.flops, machine.bandwidth, machine.layer_s)


@dataclass(frozen=True)
class Layout:
    """A model as far as its time goes.

    read_bytes: weights that a decode step reads; weights: their number; head: those of them that turn a row into
    logits, of a prompt its last one alone; layers; heads: query heads; width: query heads times D; token_bytes: keys
    and values of one token in all layers.
    """

    read_bytes: int
    weights: int
    head: int
    layers: int
    heads: int
    width: int
    token_bytes: int


@lru_cache
def layout(name: str) -> Layout:
    """The layout of one of `benchmarks.shapes.SHAPES`, without making its weights."""
    shape = SHAPES[name]
    config = AutoConfig.for_model(shape.family, **shape.config)
    dtype = getattr(torch, shape.dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    read, heads = weight_bytes(model), int(config.num_attention_heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // heads) * heads
    layers, head = int(config.num_hidden_layers), model.get_output_embeddings().weight.numel()
    return Layout(read, read // dtype.itemsize, head, layers, heads, width, slot_bytes(config, dtype))


@dataclass(frozen=True)
class Forward:
    """What one forward does: bytes read and written, layers, and operations of the three kinds of `Speeds`.

    A multiplication and an addition are two operations.
    """

    bytes: float
    layers: int
    linear: float
    attention: float = 0
    observation: float = 0

    def parts(self, at: Speeds) -> dict[str, float]:
        """Seconds of its bytes, of its operations and of its launches."""
        operations = self.linear / at.linear + self.attention / at.attention + self.observation / at.observation
        return {"bytes": self.bytes / at.bandwidth, "operations": operations, "launches": self.layers * at.layer_s}

    def seconds(self, at: Speeds) -> float:
        """The predicted time."""
        parts = self.parts(at)
        return max(parts["bytes"], parts["operations"]) + parts["launches"]

    def limit(self, at: Speeds) -> str:
        """What takes most of it: bytes, operations or launches."""
        parts = self.parts(at)
        return max(parts, key=lambda name: parts[name])


def decode_step(of: Layout, variant: Variant, slots: float, rows: int) -> Forward:
    """One new token in each of `rows` rows that read `slots` slots; what scores also reads and writes its attention."""
    cells = rows * of.layers * of.heads * slots
    scores = 2 * FLOAT * cells * (variant.kind in SCORED) + FLOAT * cells * (variant.kind == "keyformer")  # its noise
    read = of.read_bytes + rows * slots * of.token_bytes + scores
    return Forward(read, of.layers, 2 * of.weights * rows, 4 * of.layers * of.width * slots * rows)


def prefill(of: Layout, variant: Variant, prompt: int, rows: int) -> Forward:
    """A prompt of so many tokens in `rows` rows, causal; what scores multiplies its queries and all keys twice more."""
    linear = 2 * ((of.weights - of.head) * prompt + of.head) * rows
    attention = 2 * of.layers * of.width * prompt**2 * rows
    return Forward(
        of.read_bytes + prompt * rows * of.token_bytes,
        of.layers,
        linear,
        attention,
        attention * observed(variant, prompt),
    )


def observed(variant: Variant, prompt: int) -> float:
    """The share of a prompt's pairs of query and key that a method observes."""
    if variant.kind not in SCORED:
        return 0.0
    unseen = max(0, prompt - A2SF_QUERIES) if variant.kind == "a2sf" else 0
    return 1 - (unseen / prompt) ** 2


def generation(at: Speeds, of: Layout, variant: Variant, prompt: int, new: int, rows: int) -> dict[str, float]:
    """Seconds of `new` tokens after a prompt: ttft_s, tpot_s, total_s."""
    first = prefill(of, variant, variant.prompt_tokens(prompt), rows).seconds(at)
    step = decode_step(of, variant, variant.slots(prompt, new), rows).seconds(at)
    return {"ttft_s": first, "tpot_s": step, "total_s": first + (new - 1) * step}


def sweep(at: Speeds, of: Layout, variants: list[Variant], prompt: int, new: int, prompts: int) -> dict[str, float]:
    """Seconds of every variant on so many prompts: one after the other, and with one prefill and joint steps."""
    alone = sum(generation(at, of, variant, prompt, new, 1)["total_s"] for variant in variants)
    scored = next((variant for variant in variants if variant.kind in SCORED), variants[0])
    steps = [decode_step(of, variant, variant.slots(prompt, new), 1) for variant in variants]
    joint = Forward(
        sum(step.bytes for step in steps) - (len(steps) - 1) * of.read_bytes,
        of.layers,
        sum(step.linear for step in steps),
        sum(step.attention for step in steps),
    )
    shared = prefill(of, scored, prompt, 1).seconds(at) + (new - 1) * joint.seconds(at)
    return {"one_by_one_s": prompts * alone, "shared_s": prompts * shared}
