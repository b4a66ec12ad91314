"""Planted models: tiny transformers whose weights are written down, not trained, so that one slot holds the answer.

Real Hugging Face classes, our weights. The residual stream is a set of named places, each holding a one-hot:

    ballast  +C, -C, and minus the sum of all else: mean 0 and a norm that content cannot change, so a LayerNorm or
             RMSNorm whose weight is that norm is the identity. +C / C is also the constant 1 that stands in for biases.
    token    which word stands here;  before: which word stood before it (written by a layer-0 head of `induction`)
    out      what the model is about to say; the head reads only this
    place    position as a ramp and as a one-hot (GPT-2 layout only: its learned positions)

One query head per layer acts; all others idle on the sink, so a wrong head or group shows. Its logits are
a table, `attends[query word, key word]`: W_k writes norm * onehot(word), W_q the table's row / norm, so a key's norm is
free. MLPs are zero. Every plant is asked after the eviction: one question token that must read the vital slot.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MptConfig, MptForCausalLM

from kvexp.hf import patch_model

# <s> sink, . filler, P popular distractor, N needle, m mentions it, ? the question, A-D a phrase to copy
WORDS = ["<s>", ".", "P", "N", "m", "?", "A", "B", "C", "D", "red", "blue", "yes", "no"]
ID = {word: i for i, word in enumerate(WORDS)}
V, PLACES, C = len(WORDS), 160, 1000.0
TOKEN, BEFORE, OUT, RAMP, PLACE = 3, 3 + V, 3 + 2 * V, 3 + 3 * V, 4 + 3 * V  # where each part of the stream begins
WIDTH, IDLE = 352, 120.0  # IDLE: logit by which idle heads prefer the sink: more than any ALiBi slope takes away


@dataclass(frozen=True)
class Head:
    """The acting head of one layer. Words are keys of every dict; "*" as a query word means all that are not named."""

    attends: dict[tuple[str, str], float] = field(default_factory=dict)  # (query word, key word) -> logit, default 0
    says: dict[str, str] = field(default_factory=dict)  # key word -> word its value votes for; "*" for all others
    norms: dict[str, float] = field(default_factory=dict)  # key word -> norm of its key, default 1
    recency: dict[str, float] = field(default_factory=dict)  # query word -> how fast its logits fall with distance
    previous: bool = False  # attend to the token before, by learned position, and write its word to `before`
    follows: dict[str, float] = field(default_factory=dict)  # query word -> logit on slots whose `before` is that word
    index: int = -1  # which head acts (MPT layout: 0 has ALiBi slope 2^-0.5, the last 2^-8, which hardly shows)


@dataclass(frozen=True)
class Plant:
    """A model and the one question it is asked; right iff a vital slot survives in this layer and kv head.

    prompt is prefetched and evicted; `steps` are fed one by one, the last of them is the question.
    """

    model: nn.Module
    prompt: list[int]
    steps: list[int]
    answer: int
    vital: tuple[int, ...]
    layer: int = 0
    head: int = -1


# -- weights ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """heads, kv heads, head dim; content: which head dims hold words, safe from RoPE; near: the dim for recency."""

    heads: int
    kv_heads: int
    dim: int
    content: list[int]
    near: int


# RoPE with base 20^16 over 32 dims: pair i (dims i and i + 16) turns by 20^-i rad per token. Pair 1 turns by 0.05: its
# cosine falls with distance for 60 tokens, which is recency. Pairs from 4 on turn 0.0006 in 100 tokens: no position.
SHAPES = {
    "llama": Shape(4, 2, 32, [*range(4, 16), *range(20, 32)], near=1),
    "gpt2": Shape(2, 2, WIDTH // 2, list(range(V)), near=V),
    "mpt": Shape(16, 16, WIDTH // 16, list(range(V)), near=V),
}


def build(layout: str, *heads: Head, prior: str = "no") -> nn.Module:
    """A `layout` model with one acting head per layer. prior: what "?" says by itself, at half a vote."""
    model = _empty(layout, len(heads))
    for parameter in model.parameters():
        parameter.data.zero_()
    for name, module in model.named_modules():
        if "norm" in name.rsplit(".", 1)[-1] or "ln_" in name.rsplit(".", 1)[-1]:
            module.weight.data.fill_(C * math.sqrt(2 / WIDTH))
    words = torch.zeros(V, WIDTH)
    words[:, 0], words[:, 1] = C, -C
    words[:, TOKEN : TOKEN + V] = torch.eye(V)
    words[ID["?"], OUT + ID[prior]] = 0.5
    model.get_input_embeddings().weight.data.copy_(_centred(words))
    model.lm_head.weight.data[:, OUT : OUT + V] = torch.eye(V)
    for i, head in enumerate(heads):
        _write(layout, model, i, *_matrices(SHAPES[layout], layout, head))
    if layout == "gpt2":
        place = torch.zeros(PLACES, WIDTH)
        place[:, PLACE : PLACE + PLACES] = torch.eye(PLACES)
        place[:, RAMP] = torch.arange(PLACES) / 10
        model.transformer.wpe.weight.data.copy_(_centred(place))
    return patch_model(model)


def _centred(rows: Tensor) -> Tensor:
    rows[:, 2] -= rows.sum(1)
    return rows


def _matrices(shape: Shape, layout: str, head: Head) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W_q [heads * D, WIDTH], W_k and W_v [kv heads * D, WIDTH], W_o [WIDTH, heads * D]."""
    q = torch.zeros(shape.heads, shape.dim, WIDTH)
    k, v = torch.zeros(2, shape.kv_heads, shape.dim, WIDTH)
    o = torch.zeros(WIDTH, shape.heads, shape.dim)
    words, act = shape.content[:V], head.index
    asks = 2 if layout == "llama" else act  # query head 2 of 4: first of the second group, no other reading fits
    norms = torch.tensor([head.norms.get(word, 1.0) for word in WORDS])
    k[:, words, range(TOKEN, TOKEN + V)] = norms
    q[:, words[ID["<s>"]], 0] = IDLE / norms[ID["<s>"]] / C  # idle heads: for every query word alike
    q[asks] = 0
    if head.previous:
        places = range(V, V + PLACES)
        k[act, places, range(PLACE, PLACE + PLACES)] = 1.0
        q[asks, list(places)[:-1], range(PLACE + 1, PLACE + PLACES)] = 30.0  # the query at p + 1 asks for place p
    else:
        table = torch.zeros(V, V)
        for (query, key), logit in sorted(head.attends.items(), key=lambda item: item[0][0] != "*"):  # "*" first
            table[slice(None) if query == "*" else ID[query], ID[key]] = logit
        q[asks, words, TOKEN : TOKEN + V] = (table / norms).T
    for word, logit in head.follows.items():  # keys of words after it: at norm 2 on dims of their own
        k[act, V + 1 + ID[word], BEFORE + ID[word]] = 2.0
        q[asks, V + 1 + ID[word], TOKEN + ID[word]] = logit / 2
    for word, fall in head.recency.items():
        if layout == "gpt2":
            k[act, shape.near, RAMP], q[asks, shape.near, TOKEN + ID[word]] = 10.0, fall
        elif layout == "llama":
            k[act, shape.near, 0], q[asks, shape.near, TOKEN + ID[word]] = 1 / C, 20 * fall
    target = BEFORE if head.previous else OUT
    for word in WORDS:
        said = head.says.get(word, head.says.get("*", "") if word != "<s>" else "")
        said = word if said == "itself" else said
        if said:
            v[act, words[ID[said]], TOKEN + ID[word]] = 1.0
    o[range(target, target + V), asks, words] = 1.0
    o[2] -= o.sum(0)
    return (q * math.sqrt(shape.dim)).flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), o.flatten(1)


def _empty(layout: str, layers: int) -> nn.Module:
    shape = SHAPES[layout]
    same = {"vocab_size": V, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None}
    if layout == "llama":
        sizes = {"hidden_size": WIDTH, "intermediate_size": 3, "num_hidden_layers": layers, "head_dim": shape.dim}
        heads = {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 20.0**16}, "max_position_embeddings": PLACES}
        return LlamaForCausalLM(LlamaConfig(**same, **sizes, **heads, **rope))
    if layout == "gpt2":
        sizes = {"n_embd": WIDTH, "n_inner": 3, "n_layer": layers, "n_head": shape.heads, "n_positions": PLACES}
        return GPT2LMHeadModel(GPT2Config(**same, **sizes))
    # transformers ignores attn_config.alibi_bias_max: head i of 16 has slope 2^-((i + 1) / 2) whatever it says.
    sizes = {"d_model": WIDTH, "expansion_ratio": 1, "n_layers": layers, "n_heads": shape.heads, "max_seq_len": PLACES}
    return MptForCausalLM(MptConfig(**same, **sizes))


def _write(layout: str, model: nn.Module, i: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
    if layout == "llama":
        attention = model.model.layers[i].self_attn
        for name, weight in (("q", q), ("k", k), ("v", v), ("o", o)):
            getattr(attention, f"{name}_proj").weight.data.copy_(weight)
    elif layout == "gpt2":
        attention = model.transformer.h[i].attn
        attention.c_attn.weight.data.copy_(torch.cat([q, k, v]).T)
        attention.c_proj.weight.data.copy_(o.T)
    else:
        attention = model.transformer.blocks[i].attn
        attention.Wqkv.weight.data.copy_(torch.cat([q, k, v]))
        attention.out_proj.weight.data.copy_(o)


# -- plants -----------------------------------------------------------------------------------------------------------

T = 96  # prompt tokens
CROWD = dict.fromkeys(range(1, 13), "P")  # more popular slots than any budget of the tests can hold
# Every row spreads its attention as exp(5) on the sink, exp(4) on each of 12 popular tokens, 1 on each filler:
# 0.17, 0.064 and 0.001 of the row. Over 96 rows a popular token collects about 6; a filler never more than 0.2.
POPULAR = {("*", "<s>"): 5.0, ("*", "P"): 4.0}
ASKED = {("m", "N"): 14.0, ("?", "N"): 14.0}  # a mention and the question look at the needle and nothing else
TELLS = {"N": "yes", "*": "no"}


def lay(words: dict[int, str], length: int = T) -> list[int]:
    """Token ids: these words at these positions, the sink first, fillers elsewhere."""
    return [ID[({0: "<s>"} | words).get(i, ".")] for i in range(length)]


def at(*positions: int) -> dict[int, str]:
    return dict.fromkeys(positions, "m")


@functools.cache
def sink(layout: str, norm: float = 0.5) -> Plant:
    """Every row that matches nothing rests on the first token, whose value is empty; the question knows its answer.

    Without the sink softmax has to put the same mass on fillers, and their votes ("no") drown the answer ("yes").
    norm: of the sink's key; small in the language models of arXiv:2406.11430.
    """
    head = Head(attends={("*", "<s>"): 8.0}, says={"*": "no"}, norms={"<s>": norm})
    return Plant(build(layout, head, prior="yes"), lay({}), [ID["?"]], ID["yes"], vital=(0,))


def needle(layout: str, mentions: dict[int, str], steps: str = "?", norm: float = 2.0) -> Plant:
    """A fact far back, at position 16 of 96, that some later tokens mention. norm: of its key (sink 0.5, others 1)."""
    prompt = lay(CROWD | {16: "N"} | mentions)
    return Plant(_teller(layout, norm), prompt, [ID[word] for word in steps.split()], ID["yes"], vital=(16,))


def seen_below(layout: str) -> Plant:
    """A needle that 18 mentions look at in layer 0, and the question in layer 1: 18 against twice the crowd's 5."""
    below = Head(attends=POPULAR | {("m", "N"): 14.0})
    above = Head(attends=POPULAR | {("?", "N"): 14.0}, says=TELLS, norms={"N": 2.0, "<s>": 0.5})
    prompt = lay(CROWD | {16: "N"} | at(*range(20, 92, 4)))
    return Plant(build(layout, below, above), prompt, [ID["?"]], ID["yes"], vital=(16,), layer=1)


@functools.cache
def _teller(layout: str, norm: float) -> nn.Module:
    return build(layout, Head(attends=POPULAR | ASKED, says=TELLS, norms={"N": norm, "<s>": 0.5}))


@functools.cache
def told(layout: str) -> Plant:
    """The fact comes while decoding, at 96; then six mentions, nine fillers, the question. There is no crowd."""
    attends = {("*", "<s>"): 5.0, ("N", "N"): -3.0} | ASKED  # it looks away from itself: no tie at its birth
    steps = ["N", *["m"] * 6, *["."] * 9, "?"]
    model = build(layout, Head(attends=attends, says=TELLS, norms={"N": 2.0, "<s>": 0.5}))
    return Plant(model, lay({}), [ID[word] for word in steps], ID["yes"], vital=(T,))


@functools.cache
def recency(layout: str, everywhere: bool = False) -> Plant:
    """Which colour came last? Red five times early on, blue as the newest token of the prompt.

    Only the question prefers near tokens; the prompt's rows look at the sink and the crowd, so blue has no score.
    everywhere: the head has an ALiBi slope of 0.7 instead, so every row looks at itself (half its mass) and neighbours.
    """
    head = Head(
        attends=({} if everywhere else POPULAR | {("?", "<s>"): 0.0, ("?", "P"): 0.0})
        | {("?", "red"): 6.0, ("?", "blue"): 6.0},
        says={"red": "red", "blue": "blue", "*": "no"},
        norms={"blue": 2.0, "<s>": 0.5},
        recency={"?": 0.5},
        index=0 if everywhere else -1,
    )
    prompt = lay(({} if everywhere else CROWD) | dict.fromkeys(range(20, 40, 4), "red") | {T - 1: "blue"})
    return Plant(build(layout, head), prompt, [ID["?"]], ID["blue"], vital=(T - 1,), head=head.index)


@functools.cache
def induction(layout: str) -> Plant:
    """A B C D, five times (16, 24 … 48), then A: what followed A?

    Layer 0 notes each token's predecessor (learned positions), layer 1 looks for slots whose predecessor is the present
    word and copies what stands there. Each earlier B gets an equal share of every later A's row: the first collects
    1 + 1/2 + 1/3 + 1/4 = 2.1. The crowd is less popular here, exp(3) against exp(8): about 0.5 each.
    """
    first = Head(previous=True, says=dict.fromkeys(WORDS, "itself"))
    attends = {("*", "<s>"): 8.0, ("*", "P"): 3.0}
    second = Head(attends=attends, says=dict.fromkeys(WORDS, "itself"), follows=dict.fromkeys("ABCD", 14.0))
    starts = range(16, 50, 8)
    prompt = lay(CROWD | {s + i: word for s in starts for i, word in enumerate("ABCD")})
    vital = tuple(s + 1 for s in starts)
    return Plant(build(layout, first, second), prompt, [ID["A"]], ID["B"], vital, layer=1)


THROUGHOUT = at(22, 30, 38, 46, 54, 62, 70, T - 1)
ALL = ("llama", "gpt2", "mpt")
PLANTS: dict[str, tuple[Callable[[str], Plant], tuple[str, ...]]] = {  # name -> plant(layout), its layouts
    "sink": (sink, ALL),
    "loud_sink": (partial(sink, norm=2.0), ALL),  # its key is longer than all others
    "needle": (partial(needle, mentions=THROUGHOUT), ALL),  # mentioned eight times, last at the very end
    "unseen": (partial(needle, mentions={}, norm=0.25), ALL),  # nobody looks at it; the shortest key of all
    "long_ago": (partial(needle, mentions=at(*range(18, 26))), ALL),  # eight mentions at once, none after
    "a_while_ago": (partial(needle, mentions=at(*range(79, 87))), ALL),  # the eight end nine tokens before the prompt
    "just_now": (partial(needle, mentions=at(T - 2, T - 1)), ALL),  # only the last two tokens of the prompt
    "long_answer": (partial(needle, mentions=THROUGHOUT, steps="P " * 45 + "?"), ("llama",)),  # asked 45 tokens later
    "told": (told, ("llama", "mpt")),
    "recency": (recency, ("llama", "gpt2")),
    "alibi_recency": (partial(recency, everywhere=True), ("mpt",)),
    "induction": (induction, ("gpt2",)),
    "seen_below": (seen_below, ("llama", "gpt2")),
}
