"""A recorded .npz as configuration, arrays and a Hugging Face model with its weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from kvexp.errors import ConfigError
from kvexp.models.state_dict import model_from_state

# Fields of recorded Hugging Face configurations that shape the computation; everything else there is bookkeeping.
_KEPT = (
    *("vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "hidden_act", "rms_norm_eps", "layer_norm_eps", "head_dim"),
    *("ffn_dim", "word_embed_proj_dim", "do_layer_norm_before", "activation_function", "enable_bias"),
    *("use_parallel_residual", "tie_word_embeddings", "attention_bias", "sliding_window", "n_positions"),
)


class Recording(Mapping[str, np.ndarray]):
    """Arrays by name; `config` parsed; weights (`w:NAME`) apart."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as data:
            arrays = {name: data[name] for name in data.files}
        self.path = path
        self.weights = {name[2:]: arrays.pop(name) for name in list(arrays) if name.startswith("w:")}
        self.config: dict[str, Any] = json.loads(str(arrays.pop("config"))) if "config" in arrays else {}
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

    def tensor(self, name: str) -> torch.Tensor:
        """The array as a tensor, float32 for floats."""
        array = torch.from_numpy(np.array(self[name]))
        return array.float() if array.is_floating_point() else array

    def whole_number(self, word: str) -> int | None:
        """The one number with `word` in its name, of fields and configuration; None where there is none."""
        said = {n: int(x) for n, x in self.arrays.items() if word in n and x.ndim == 0 and x.dtype.kind in "iu"}
        self.read.update(said)
        said |= {name: value for name, value in self.config.items() if word in name and type(value) is int}
        if len(set(said.values())) > 1:
            raise ConfigError(f"{self.path}: which of these holds? {', '.join(f'{n}={x}' for n, x in said.items())}")
        return next(iter(said.values()), None)

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
            return model_from_state(
                self.kind, state, bos_token_id=None, eos_token_id=None, pad_token_id=None, **self._settings()
            )
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
