"""The weights of a GGUF file as safetensors of Hugging Face's names: dequantised to float32, a tensor at a time."""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvexp.errors import ConfigError
from kvexp.models.checkpoint import SHOWN
from kvexp.models.gguf_header import GgufHeader, GgufTensor

PART = 2 << 30  # bytes of a safetensors file: what is held in memory on the way
ROPE_FACTORS = "rope_freqs.weight"  # not a weight: the configuration's scaling of positions
LLAMA = {
    **{"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"},
    **{"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    **{name: f"self_attn.{name[-1]}_proj" for name in ("attn_q", "attn_k", "attn_v")},
    **{"attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
GPT2 = {
    **{"token_embd": "transformer.wte", "position_embd": "transformer.wpe"},
    **{"output_norm": "transformer.ln_f", "output": "lm_head"},
    **{"attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj"},
    **{"ffn_norm": "ln_2", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
}
LAYERS = {"gpt2": (GPT2, "transformer.h"), "llama": (LLAMA, "model.layers")}
TRANSPOSED = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")  # GPT-2's are stored input first


def name_of(name: str, architecture: str) -> str | None:
    """Hugging Face's name of the GGUF tensor `name`; None where the architecture has no such tensor."""
    names, layers = LAYERS.get(architecture, LAYERS["llama"])
    parts = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if parts is None or parts[2] not in names:
        return None
    place = f"{layers}.{parts[1]}." if parts[1] is not None else ""
    return f"{place}{names[parts[2]]}.{parts[3]}"


def read_tensor(data: mmap.mmap, tensor: GgufTensor) -> Tensor:
    """The tensor's elements, dequantised to float32, in torch's shape; data: the file's bytes."""
    from gguf import GGMLQuantizationType, dequantize, quant_shape_to_byte_shape

    kind = GGMLQuantizationType[tensor.kind]
    raw = np.frombuffer(data, np.uint8, tensor.size, tensor.start)
    plain: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
    if tensor.kind in plain:
        numbers = raw.view(plain[tensor.kind]).astype(np.float32)
    else:
        try:
            numbers = dequantize(raw.reshape(quant_shape_to_byte_shape(tensor.shape, kind)), kind)
        except NotImplementedError as error:
            raise ConfigError(f"the installed gguf cannot read {tensor.kind} ({tensor.name}): update it") from error
    return torch.from_numpy(np.array(numbers, np.float32).reshape(tensor.shape))


def check_names(header: GgufHeader, config: Any) -> None:
    """ConfigError where the file's tensors are not those of the configuration: missing, unknown or of another shape."""
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    wanted = {name: tuple(weight.shape) for name, weight in state.items()}
    if config.tie_word_embeddings:
        wanted.pop("lm_head.weight", None)
    found = {}
    for name, tensor in header.tensors.items():
        if name == ROPE_FACTORS:
            continue
        known = name_of(name, header.architecture) or name
        found[known] = tensor.shape[::-1] if _transposed(known, header) else tensor.shape
    wrong = {
        "missing": [name for name in wanted if name not in found],
        "unknown": [name for name in found if name not in wanted],
        "of another shape": [name for name, shape in found.items() if name in wanted and wanted[name] != shape],
    }
    if any(wrong.values()):
        said = "; ".join(f"{kind}: {_some(names)}" for kind, names in wrong.items() if names)
        raise ConfigError(f"the tensors of {header.path} are not those of its header ({said}): fetch it again")


def write_weights(header: GgufHeader, folder: Path, advance: Callable[[], None]) -> None:
    """Write the file's weights into the folder as safetensors.

    In files of at most PART bytes, or of one tensor where that is larger. advance: is called after each tensor.
    """
    parts: list[dict[str, Tensor]] = [{}]
    names: dict[str, int] = {}
    held = total = 0
    for name, weight in _weights(header):
        size = weight.numel() * 4
        if parts[-1] and held + size > PART:
            _save(parts[-1], folder / f"part-{len(parts)}.safetensors")
            parts[-1] = {}
            parts.append({})
            held = 0
        parts[-1][name] = weight
        names[name] = len(parts)
        held, total = held + size, total + size
        advance()
    if len(parts) == 1:
        _save(parts[0], folder / "model.safetensors")
        return
    _save(parts[-1], folder / f"part-{len(parts)}.safetensors")
    files = {number: f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)}
    for number, file in files.items():
        (folder / f"part-{number}.safetensors").rename(folder / file)
    index = {"metadata": {"total_size": total}, "weight_map": {name: files[part] for name, part in names.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1, sort_keys=True), "utf-8")


def rope_factors(header: GgufHeader) -> Tensor | None:
    """The numbers by which RoPE's frequencies are divided, float32 [D / 2]; None where the file has none."""
    tensor = header.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    with header.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return read_tensor(data, tensor)


def _weights(header: GgufHeader) -> Iterator[tuple[str, Tensor]]:
    """The file's weights one by one: Hugging Face's name, and the tensor in float32 in Hugging Face's layout."""
    heads = int(header.fields[f"{header.architecture}.attention.head_count"])
    grouped = int(header.fields.get(f"{header.architecture}.attention.head_count_kv", heads))
    with header.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for name, tensor in header.tensors.items():
            known = name_of(name, header.architecture)
            if name == ROPE_FACTORS or known is None:
                continue
            weight = read_tensor(data, tensor)
            if header.architecture == "llama" and ".attn_q." in name:
                weight = _halves_apart(weight, heads)
            elif header.architecture == "llama" and ".attn_k." in name:
                weight = _halves_apart(weight, grouped)
            elif _transposed(known, header):
                weight = weight.T
            yield known, weight.contiguous()


def _halves_apart(weight: Tensor, heads: int) -> Tensor:
    """A llama's query or key projection in Hugging Face's order of rows.

    llama.cpp's RoPE rotates neighbouring rows of a head, Hugging Face's rows half a head apart. weight: [H * D, ...],
    the rows of the projection or its bias.
    """
    width = weight.shape[0] // heads
    return weight.reshape(heads, width // 2, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _transposed(known: str, header: GgufHeader) -> bool:
    """Whether GGUF and Hugging Face store the weight called `known` transposed to each other (GPT-2's projections)."""
    return header.architecture == "gpt2" and bool(TRANSPOSED.search(known))


def _save(weights: dict[str, Tensor], file: Path) -> None:
    """Write tensors by name into one safetensors file."""
    save_file(weights, file, metadata={"format": "pt"})


def _some(names: list[str]) -> str:
    """The first few names as text for a message, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
