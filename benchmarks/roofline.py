"""What a forward must at least read and compute, and how long a machine then takes: a prediction, no measurement.

A machine has three numbers: operations and bytes per second that eager code reaches, and seconds per layer of Python
and launches. A forward takes the longer of its operations and its bytes, plus that time of every layer. Left out: what
cannot be told from shapes (page faults, copies of beams, a method's bookkeeping beyond the bytes of its scores).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.floor import slot_bytes, weight_bytes
from benchmarks.shapes import SHAPES
from benchmarks.variants import Variant
from kvexp.dry_run.cost import Machine

SCORED = ("h2o", "keyformer", "keyformer_quiet", "a2sf")  # methods that read every slot's attention at every step
FLOAT = 4  # bytes of a score or a logit


@dataclass(frozen=True)
class Layout:
    """A model as far as its time goes.

    read_bytes: weights that a decode step reads; weights: their number; layers; heads: query heads; width: query heads
    times D; token_bytes: keys and values of one token in all layers.
    """

    read_bytes: int
    weights: int
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
    layers = int(config.num_hidden_layers)
    return Layout(read, read // dtype.itemsize, layers, heads, width, slot_bytes(config, dtype))


@dataclass(frozen=True)
class Forward:
    """What one forward does: bytes read and written, operations (a multiplication and an addition are two), layers."""

    bytes: float
    flops: float
    layers: int

    def seconds(self, machine: Machine) -> float:
        """The predicted time."""
        return max(self.bytes / machine.bandwidth, self.flops / machine.flops) + self.layers * machine.layer_s

    def limit(self, machine: Machine) -> str:
        """What takes most of it: bytes, operations or launches."""
        parts = {
            "bytes": self.bytes / machine.bandwidth,
            "operations": self.flops / machine.flops,
            "launches": self.layers * machine.layer_s,
        }
        return max(parts, key=lambda name: parts[name])


def decode_step(of: Layout, variant: Variant, slots: float, rows: int) -> Forward:
    """One new token in each of `rows` rows that read `slots` slots; what scores also reads and writes its attention."""
    cells = rows * of.layers * of.heads * slots
    scores = 2 * FLOAT * cells * (variant.kind in SCORED) + FLOAT * cells * (variant.kind == "keyformer")  # its noise
    read = of.read_bytes + rows * slots * of.token_bytes + scores
    return Forward(read, 2 * of.weights * rows + 4 * of.layers * of.width * slots * rows, of.layers)


def prefill(of: Layout, variant: Variant, prompt: int, rows: int) -> Forward:
    """A prompt of so many tokens in `rows` rows, causal; what scores multiplies queries and keys two times more."""
    products = 2 * of.layers * of.width * prompt**2 * rows * (1 + (variant.kind in SCORED))
    read = of.read_bytes + prompt * rows * of.token_bytes
    return Forward(read, 2 * of.weights * prompt * rows + products, of.layers)


def generation(machine: Machine, of: Layout, variant: Variant, prompt: int, new: int, rows: int) -> dict[str, float]:
    """Seconds of `new` tokens after a prompt: ttft_s, tpot_s, total_s."""
    first = prefill(of, variant, variant.prompt_tokens(prompt), rows).seconds(machine)
    step = decode_step(of, variant, variant.slots(prompt, new), rows).seconds(machine)
    return {"ttft_s": first, "tpot_s": step, "total_s": first + (new - 1) * step}


def sweep(
    machine: Machine, of: Layout, variants: list[Variant], prompt: int, new: int, prompts: int
) -> dict[str, float]:
    """Seconds of every variant on so many prompts: one after the other, and with one prefill and joint steps."""
    alone = sum(generation(machine, of, variant, prompt, new, 1)["total_s"] for variant in variants)
    scored = next((variant for variant in variants if variant.kind in SCORED), variants[0])
    steps = [decode_step(of, variant, variant.slots(prompt, new), 1) for variant in variants]
    joint = Forward(
        sum(step.bytes for step in steps) - (len(steps) - 1) * of.read_bytes,
        sum(step.flops for step in steps),
        of.layers,
    )
    shared = prefill(of, scored, prompt, 1).seconds(machine) + (new - 1) * joint.seconds(machine)
    return {"one_by_one_s": prompts * alone, "shared_s": prompts * shared}
