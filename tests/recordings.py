"""Numbers recorded from other people's code, and their one loader: a .npz of arrays by name, what it is about as JSON.

`about` (in recordings of whole generations: `config`) says what was run, and how; `w:NAME` is a weight of the model by
its name in the state dict. A file of several recordings has one prefix for each, `NAME/`, and `about["parts"][NAME]`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from kvexp.hf.attach import patch_model
from kvexp.hf.load import random_config, without_report
from kvexp.util.errors import ConfigError

FIXTURES = Path(__file__).parent / "fixtures"


def model_from_state(state: dict[str, Tensor], config: Any) -> Any:
    """A float32 model of a configuration with exactly these weights, attending through kvexp.

    ConfigError that names the weight where one is missing, unknown or of another shape.
    """
    with without_report():
        model, found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
            None,
            config=config,
            state_dict=dict(state),
            dtype=torch.float32,
            attn_implementation="eager",
            ignore_mismatched_sizes=True,  # refused below, with all the others
            output_loading_info=True,
        )
    unknown = found["unexpected_keys"]
    shapes = [name for name, *_ in found["mismatched_keys"]]
    wrong = {"missing": found["missing_keys"], "unknown": unknown, "of another shape": shapes}
    if any(wrong.values()):
        said = "; ".join(f"{how}: {', '.join(sorted(names))}" for how, names in wrong.items() if names)
        raise ConfigError(f"these weights are not those of a {config.model_type} model: {said}")
    return patch_model(model)


# Fields of recorded Hugging Face configurations that shape the computation; everything else there is bookkeeping.
_KEPT = (
    *("vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "hidden_act", "rms_norm_eps", "layer_norm_eps", "head_dim"),
    *("ffn_dim", "word_embed_proj_dim", "do_layer_norm_before", "activation_function", "enable_bias"),
    *("use_parallel_residual", "tie_word_embeddings", "attention_bias", "sliding_window", "n_positions"),
)


class Recording(Mapping[str, np.ndarray]):
    """Arrays by name; `config`: what the file says of itself, parsed; weights (`w:NAME`) apart."""

    def __init__(self, path: str | Path, part: str = "") -> None:
        """path: a file, or the name of one in tests/fixtures; part: the prefix of one of its recordings."""
        file = Path(path) if str(path).endswith(".npz") else FIXTURES / f"{path}.npz"
        with open(file, "rb") as stream, np.load(stream, allow_pickle=False) as data:
            arrays = {name: data[name] for name in data.files}
        about = [json.loads(str(arrays.pop(name))) for name in ("about", "config") if name in arrays]
        self.path = str(path)
        self.config: dict[str, Any] = about[0] if about else {}
        if part:
            self.config = self.config["parts"][part]
            arrays = {name[len(part) + 1 :]: arrays[name] for name in arrays if name.startswith(f"{part}/")}
        self.weights = {name[2:]: arrays.pop(name) for name in list(arrays) if name.startswith("w:")}
        self.arrays = arrays
        self.read: set[str] = set()  # names of the arrays that were asked for

    def __getitem__(self, name: str) -> np.ndarray:
        self.read.add(name)
        array: np.ndarray = self.arrays[name]
        return array

    def __contains__(self, name: object) -> bool:
        return name in self.arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    def tensor(self, name: str) -> Tensor:
        """The array as a tensor, float32 for floats."""
        array = torch.from_numpy(np.array(self[name]))
        return array.float() if array.is_floating_point() else array

    def mask(self, name: str, length: int) -> Tensor:
        """Bits of [..., length] that were packed over the last axis, as bool."""
        return torch.from_numpy(np.unpackbits(self[name], axis=-1, count=length)).bool()

    @property
    def variant(self) -> str:
        """Which release the numbers come from, as far as the file says."""
        return str(self.config.get("variant", ""))

    @property
    def kind(self) -> str:
        """Hugging Face model_type."""
        kind = str(self.config.get("kind") or self.config.get("model_type") or "")
        return {"gptneox": "gpt_neox"}.get(kind, kind)

    def model(self) -> Any:
        """A float32 model with the recorded weights, attending through kvexp.

        transformers loads them, so a name that its releases have changed (GPT-NeoX's embed_out) is still understood.
        """
        state = {name: torch.from_numpy(np.array(array)) for name, array in self.weights.items()}
        try:
            if isinstance(settings := self.config.get("config"), dict):
                return model_from_state(state, random_config("llama", **settings))
            ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
            return model_from_state(state, random_config(self.kind, **ids, **self._settings()))
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from error

    def _settings(self) -> dict[str, Any]:
        c = self.config
        if self.kind in ("gptj", "gpt2"):
            settings = {"n_embd": c["hidden"], "n_layer": c["layers"], "n_head": c["heads"], "vocab_size": c["vocab"]}
            if self.kind == "gptj":
                return settings | {"n_positions": c.get("n_positions", 1024), "rotary_dim": c.get("rotary_dim", 4)}
            # As in the authors' own configuration class: Hugging Face's GPT-2 has the tanh formula, gelu_new.
            settings["activation_function"] = c.get("activation_function", "gelu")
            if "transformer.wpe.weight" in self.weights:
                settings["n_positions"] = len(self.weights["transformer.wpe.weight"])
            return settings
        if self.kind == "mpt":
            names = {"d_model": "hidden", "n_layers": "layers", "n_heads": "heads", "vocab_size": "vocab"}
            attention = {"alibi_bias_max": c.get("alibi_bias_max", 8)}
            return {new: c[old] for new, old in names.items()} | {"max_seq_len": 2048, "attn_config": attention}
        settings = {name: c[name] for name in _KEPT if name in c}
        theta = c.get("rotary_emb_base") or c.get("rope_theta")
        if theta:
            settings["rope_parameters"] = {"rope_type": "default", "rope_theta": float(theta)}
            if "rotary_pct" in c:
                settings["rope_parameters"]["partial_rotary_factor"] = c["rotary_pct"]
        return settings
