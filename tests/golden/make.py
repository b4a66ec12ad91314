"""`cd tests && python -m golden.make [FOLDER]`: write the recordings of this folder that no release had to be run for.

Every number comes from the loops in naive.py, releases.py and a2sf.py, which were written from a description of the
authors' code and share nothing with kvexp. Weights and prompts come from fixed seeds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from golden import a2sf, naive, releases
from golden.naive import Array

VOCAB, HIDDEN, HEADS, LAYERS, PROMPT, STEPS = 61, 24, 3, 2, 24, 12
KEYFORMER = {"keyformer": True, "kv_cache": 50, "recent": 30, "tau_init": 1.0, "tau_delta": 1 / STEPS}


def generated(forward: Callable[..., Array], prompts: Array, padding: int, rows: list[list]) -> dict[str, Array]:
    """Prompt and greedy steps of every row; rows: per row its layers. Fields: input_ids, new_tokens, logits."""
    logits, tokens = [], []
    for ids, layers in zip(prompts, rows, strict=True):
        # `layers` is bound now: a row's attention is called within this turn of the loop only.
        def attend(layer: int, q: Array, k: Array, v: Array, layers=layers) -> Array:
            return layers[layer](q, k, v)

        positions = np.maximum(np.arange(len(ids)) - padding, 0)
        seen = [forward(ids, positions, attend)[-1]]
        for step in range(STEPS):
            seen.append(forward(np.array([seen[-1].argmax()]), np.array([len(ids) - padding + step]), attend)[-1])
        best = np.sort(seen, axis=-1)
        assert (best[:, -1] - best[:, -2] > 1e-3).all(), "two tokens are nearly level: take another seed"
        logits.append(np.stack(seen))
        tokens.append(np.stack(seen).argmax(-1))
    return {"input_ids": prompts, "new_tokens": np.stack(tokens), "logits": np.stack(logits, axis=1).astype(np.float32)}


def prompts_of(rng: np.random.Generator, rows: int, padding: int) -> Array:
    ids = rng.integers(1, VOCAB, (rows, PROMPT))
    ids[:, :padding] = 0
    return ids


def masked_fields(layers: list[releases.Masked], **names: str) -> dict[str, Array]:
    """[steps + 1, layers, heads, columns]; a later step's columns are NaN. names: field -> what the layers call it."""
    made = {}
    for field, kept_as in names.items():
        width = PROMPT + STEPS + (kept_as == "keep")
        table = np.full((STEPS + 1, len(layers), HEADS, width), np.nan, np.float32)
        for index, layer in enumerate(layers):
            for step, value in enumerate(layer.fields[kept_as]):
                table[step, index, :, : value.shape[-1]] = value
        made[field] = table
    return made


def with_weights(fields: dict[str, Array], config: dict, weights: dict[str, Array]) -> dict[str, Array]:
    return {"config": np.array(json.dumps(config))} | fields | {f"w:{name}": array for name, array in weights.items()}


def keyformer_gpt2_leftpad6_gumbel(seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    padding = 6
    weights = naive.drawn(naive.gpt2_shapes(VOCAB, HIDDEN, LAYERS, PROMPT + STEPS), rng)
    config = {"kind": "gpt2", "vocab": VOCAB, "hidden": HIDDEN, "layers": LAYERS, "heads": HEADS, "prompt_len": PROMPT}
    config |= {"T": STEPS, "npad": padding, "mode": "torch"} | KEYFORMER
    budget = PROMPT * 50 // 100
    block = rng.gumbel(size=(LAYERS, 1, HEADS, PROMPT, PROMPT)).astype(np.float32)
    later = np.full((STEPS, LAYERS, 1, HEADS, PROMPT + STEPS), np.nan, np.float32)
    for step in range(STEPS):
        columns = PROMPT + step + 1
        later[step, ..., :columns] = rng.gumbel(size=(LAYERS, 1, HEADS, columns))
    taus = [1 + step / STEPS for step in range(STEPS + 1)]
    layers = []
    for layer in range(LAYERS):
        noise = [block[layer, 0], *(later[t, layer, 0, :, None, : PROMPT + t + 1] for t in range(STEPS))]
        layers.append(releases.Keyformer(budget, budget * 30 // 100, padding, noise, taus))

    def forward(ids: Array, positions: Array, attend: naive.Attend) -> Array:
        return naive.gpt2(weights, HEADS, LAYERS, ids, positions, attend)

    fields = generated(forward, prompts_of(rng, 1, padding), padding, [layers])
    fields |= {"tau": np.array(taus, np.float32), "noise_prefill": block, "noise_decode": later}
    fields |= masked_fields(layers, step_score="step_score", score_fn="score", keep_mask_next="keep")
    return with_weights(fields, config, weights)


def h2o_gptneox_hh_mask(seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    weights = naive.drawn(naive.gpt_neox_shapes(VOCAB, HIDDEN, LAYERS), rng)
    config = {"model_type": "gpt_neox", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN}
    config |= {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_act": "gelu", "rotary_pct": 0.25}
    config |= {"rotary_emb_base": 10000, "max_position_embeddings": 96, "layer_norm_eps": 1e-5}
    config |= {"use_parallel_residual": True, "tie_word_embeddings": False, "heavy_ratio": 0.25, "recent_ratio": 0.25}
    config |= {"prompt_len": PROMPT, "T": STEPS, "heavy_budget": 6, "recent_budget": 6}
    layers = [releases.H2O(12, 6) for _ in range(LAYERS)]

    def forward(ids: Array, positions: Array, attend: naive.Attend) -> Array:
        return naive.gpt_neox(weights, HEADS, LAYERS, ids, positions, attend)

    fields = generated(forward, prompts_of(rng, 1, 0), 0, [layers])
    fields |= masked_fields(layers, previous_scores="score", keep_mask_next="keep")
    return with_weights(fields, config | {"variant": "h2o_gptneox_hh_mask"}, weights)


def keyformer_mpt_streamingllm_b2_leftpad6(seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    padding, heads, rows = 6, 4, 2
    weights = naive.drawn(naive.mpt_shapes(VOCAB, HIDDEN, LAYERS), rng)
    config = {"kind": "mpt", "variant": "kfmpt_stream", "vocab": VOCAB, "hidden": HIDDEN, "layers": LAYERS}
    config |= {"heads": heads, "prompt_len": PROMPT, "T": STEPS, "B": rows, "npad": padding, "mode": "zero"}
    states = [[releases.Streaming(PROMPT * 50 // 100, padding) for _ in range(LAYERS)] for _ in range(rows)]

    def forward(ids: Array, positions: Array, attend: naive.Attend) -> Array:
        return naive.mpt(weights, heads, LAYERS, ids, positions, attend)

    fields = generated(forward, prompts_of(rng, rows, padding), padding, states)
    slots = np.full((STEPS + 1, LAYERS, heads, PROMPT + STEPS), -1)
    lengths = np.zeros((STEPS + 1, LAYERS), np.int64)
    for index, layer in enumerate(states[0]):
        for step, columns in enumerate(layer.attended):
            slots[step, index, :, : len(columns)] = columns
            lengths[step, index] = len(columns)
    fields |= {"slot_orig_pos": slots, "klen": lengths}
    return with_weights(fields, config | {"alibi_bias_max": 8} | KEYFORMER, weights)


def a2sf_rowmask_fp16(seed: int = 111) -> dict[str, Array]:
    return a2sf.rowmask(seed)


def a2sf_head_gqa(seed: int = 0) -> dict[str, Array]:
    return a2sf.grouped(seed)


MADE = (
    keyformer_gpt2_leftpad6_gumbel,
    h2o_gptneox_hh_mask,
    keyformer_mpt_streamingllm_b2_leftpad6,
    a2sf_rowmask_fp16,
    a2sf_head_gqa,
)

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent
    for make in MADE:
        np.savez_compressed(folder / f"{make.__name__}.npz", **make())
