"""What every engine in place of kvexp's own model and cache is to a run, and the file that it reads a model from.

Engines read a model from a GGUF file that kvexp writes. Its tokenizer is not used: that file has place holders for
tokens, and engines are fed token ids.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvexp.hf.fetch import check_space, folder_lock, put_in_place
from kvexp.hf.gguf import LAYERS, LLAMA
from kvexp.hf.traits import head_dim
from kvexp.util.errors import ConfigError
from kvexp.util.files import cache_folder
from kvexp.util.output import say

FILE_VERSION = 1  # of `write_gguf`
FAMILIES = ("llama", "qwen2", "qwen3")  # model types that `write_gguf` knows


@dataclass(frozen=True)
class EngineAnswer:
    """What the engine returned for one prompt.

    tokens, logprobs: greedy ones, the end token included; first_s, rest_s: seconds to the first token and after it;
    peak_blocks, blocks: blocks of its cache in use at most after a step, and after the last one but one. logits
    [N, V]: that predict each token, of an engine that gives them.
    """

    tokens: list[int]
    logprobs: list[float]
    first_s: float
    rest_s: float
    peak_blocks: int
    blocks: int
    logits: NDArray[np.float32] | None = None


class Engine(Protocol):
    """A loaded model with one setting of its cache and one of its eviction, on a CPU, one prompt at a time.

    layers: of the model; block: tokens that its cache holds or drops together.
    """

    layers: int
    block: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers, as the engine counts them; 0 before the first answer."""

    def first_eviction(self, prompt: int) -> int | None:
        """The step that first evicts behind a prompt of so many tokens; None: it never does."""

    def answer(self, ids: Sequence[int], new: int, ends: Collection[int] = (), least: int = 0) -> EngineAnswer:
        """Decode greedily up to `new` tokens, or an end token after `least` of them."""


class ForcedEngine(Engine, Protocol):
    """An engine that gives distributions along a given text, so that KL is measured."""

    def logits(self, ids: Sequence[int], text: Sequence[int]) -> NDArray[np.float32]:
        """Logits [N, V] that predict each of the N tokens of a text behind a prompt."""


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Natural-log probabilities in float64, over the last axis."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def kl_of(full: NDArray[np.float32], logits: NDArray[np.float32]) -> list[float]:
    """KL(full || other) in nats, in float64, of each row of logits [N, V]."""
    reference = log_softmax(full)
    divergences: list[float] = (np.exp(reference) * (reference - log_softmax(logits))).sum(-1).tolist()
    return divergences


def check_family(config: Any) -> None:
    """ConfigError for a model that no engine here can be given. config: Hugging Face's."""
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"the engine reads models of type {', '.join(FAMILIES)}, and this one is {config.model_type}: take another "
            "model, or leave out engine"
        )
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default" or getattr(config, "sliding_window", None):
        raise ConfigError(
            "the engine is given plain RoPE and no sliding window, and this model has "
            f"rope_type={rope.get('rope_type')} and sliding_window={getattr(config, 'sliding_window', None)}: take "
            "another model, or leave out engine"
        )


def model_file(model: Any, digest: str, numbers: type[np.floating[Any]] = np.float16) -> Path:
    """The model's GGUF file, written into the cache unless it is there; digest: of the model, numbers: of matrices."""
    kind = "" if numbers is np.float16 else f" {np.dtype(numbers)}"  # files from before there was a choice keep a name
    name = hashlib.sha256(f"{FILE_VERSION} {digest}{kind}".encode()).hexdigest()[:32]
    folder = cache_folder() / "engines" / name
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder_lock(folder, "writing a model for another engine"):
            if not folder.exists():
                size = np.dtype(numbers).itemsize * model.num_parameters()
                check_space(folder.parent, size)
                say(f"writing the model for the engine, once: {size / 1e6:.0f} MB, {folder}", file=sys.stderr)
                put_in_place(folder, lambda place: write_gguf(model, place / "model.gguf", numbers))
    return folder / "model.gguf"


def write_gguf(model: Any, path: Path, numbers: type[np.floating[Any]] = np.float16) -> None:
    """Write a Hugging Face model as a GGUF file: matrices as `numbers`, vectors in float32, place holders for tokens.

    ConfigError as of `check_family`.
    """
    from gguf import GGUFWriter

    config = model.config
    check_family(config)
    writer, name = GGUFWriter(path, config.model_type), config.model_type
    writer.add_file_type(1 if numbers is np.float16 else 0)  # what most of the weights are
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width = head_dim(config)
    for key, value in {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": width,
        "attention.value_length": width,
    }.items():
        writer.add_uint32(f"{name}.{key}", value)
    writer.add_float32(f"{name}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{name}.rope.freq_base", config.rope_parameters["rope_theta"])
    _place_holders(writer, config.vocab_size)
    for known, weight in model.state_dict().items():
        if known == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name == "llama" and known.endswith(("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias")):
            weight = _neighbouring(weight, heads if ".q_proj." in known else kv_heads)
        values = weight.detach().float().cpu().contiguous().numpy()
        writer.add_tensor(gguf_name(known), values.astype(numbers) if values.ndim > 1 else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _place_holders(writer: Any, count: int) -> None:
    """A vocabulary of `count` tokens that engines accept and nothing uses."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = ["<end>", "a", "b", "ab", *(f"<{number}>" for number in range(4, count))]
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * (count - 1)])  # it cannot be compiled without a control token
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)


def gguf_name(known: str) -> str:
    """The GGUF name of a weight that Hugging Face calls `known`; ConfigError for one that the families do not have."""
    stem, _, kind = known.rpartition(".")
    place = ""
    if stem.startswith(f"{LAYERS}."):
        number, _, stem = stem.removeprefix(f"{LAYERS}.").partition(".")
        place = f"blk.{number}."
    names = [theirs for theirs, ours in LLAMA.items() if ours == stem]
    if not names:
        raise ConfigError(f"a GGUF file has no place for the weight {known}: take another model")
    return f"{place}{names[0]}.{kind}"


def _neighbouring(weight: Tensor, heads: int) -> Tensor:
    """A llama's query or key projection in llama.cpp's order: rows half a head apart become neighbours."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
