"""Small GGUF files for tests, written with llama.cpp's own writer from models of random weights.

The names and the order of rows are llama.cpp's convert_hf_to_gguf.py's, written down here a second time.
"""

import json

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

from kvexp.hf import random_model
from kvexp.hf.gguf import FAMILIES_OF_GGUF

LLAMA = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
SIZES = {
    "llama": LLAMA | {"num_hidden_layers": 3},
    "qwen2": LLAMA,
    "qwen3": LLAMA | {"head_dim": 32},
    "gemma3": LLAMA | {"head_dim": 32, "query_pre_attn_scalar": 32, "num_hidden_layers": 7, "sliding_window": 16},
}
LLAMA_NAMES = {
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    **{"self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"},
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "model.layers": "blk"},
    **{"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"},
}
NORMS = {  # of Gemma, instead of a llama's
    **{"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"},
    **{"pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm"},
}
NAMES = {"gemma3_text": LLAMA_NAMES | NORMS}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SAID = "The old lamp stood past the stove in 1987, and the 12 lamps of 2023 don't. " * 20 + "\n\n  naïve café  x\n"


def bpe_tokenizer(vocab_size=400):
    """A byte-level tokenizer that splits text as SmolLM's: digits one by one, then GPT-2's pieces."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([SAID], trainer)
    return backend


def small_model(family, tokenizer, **more):
    sizes = SIZES[family] | more
    if family == "gemma3":
        torch.manual_seed(3)
        kind = FAMILIES_OF_GGUF[family]
        config = AutoConfig.for_model(kind, vocab_size=tokenizer.get_vocab_size(), initializer_range=0.2, **sizes)
        made = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for name, weight in made.named_parameters():  # made as constants, which would hide what is done to them
            if name.endswith("norm.weight"):
                weight.data = (torch.randn_like(weight) * 16).round() / 64  # to which 1 can be added without rounding
        return made
    return random_model(family, seed=3, vocab_size=tokenizer.get_vocab_size(), initializer_range=0.2, **sizes)


def neighbouring(weight, heads):
    """llama.cpp's `permute`: rows half a head apart become neighbours."""
    parts = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return parts.swapaxes(1, 2).reshape(weight.shape)


def tensors_of(model):
    """GGUF name -> numbers, as llama.cpp's converter writes them."""
    config, found = model.config, {}
    family = config.model_type
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        numbers = weight.float().numpy()
        for ours, theirs in NAMES.get(family, LLAMA_NAMES).items():
            name = name.replace(ours, theirs)
        if family in ("llama", "mistral") and ".attn_q." in name:
            numbers = neighbouring(numbers, config.num_attention_heads)
        if family in ("llama", "mistral") and ".attn_k." in name:
            numbers = neighbouring(numbers, config.num_key_value_heads)
        if family == "gemma3_text" and name.endswith("norm.weight"):
            numbers = numbers + 1
        found[name] = np.ascontiguousarray(numbers)
    return found


def add(writer, fields):
    """Write {key: value} into the header, as GGUF's type of the value's Python type."""
    kinds = {int: "uint32", float: "float32", str: "string", bool: "bool", list: "array"}
    for key, value in fields.items():
        getattr(writer, f"add_{kinds[type(value)]}")(key, value)


def write(
    path, model, tokenizer, *, kind="F32", pre="smollm", template=CHATML, fields=None, tensors=None, vocabulary=None
):
    """A GGUF file of the model. kind: of its matrices; fields: more of the header, {key: value}; tensors: instead of
    the model's own; vocabulary: the header's keys of another tokenizer, {key: value}."""
    config = model.config
    arch = {"mistral": "llama", "gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    writer = GGUFWriter(str(path), arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    scaling = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(scaling["rope_theta"])
    if arch == "gemma3":
        writer.add_sliding_window(config.sliding_window or 0)
    if arch in ("qwen3", "gemma3"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if vocabulary is None:
        add_bpe(writer, tokenizer, pre)
    else:
        add(writer, vocabulary)
    if template:
        writer.add_chat_template(template)
    add(writer, fields or {})
    for name, numbers in (tensors or tensors_of(model)).items():
        if numbers.ndim > 1 and kind != "F32":
            wanted = GGMLQuantizationType[kind]
            writer.add_tensor(name, quantize(numbers, wanted), raw_dtype=wanted)
        else:
            writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_bpe(writer, tokenizer, pre):
    known = tokenizer.get_vocab()
    tokens = sorted(known, key=known.get)
    pairs = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in pairs])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
