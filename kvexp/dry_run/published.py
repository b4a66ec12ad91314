"""Sizes of the models and data sets the configurations name, for plans made where neither can be asked.

Models: fields of the config.json beside the weights. Data: rows of the split and mean tokens of a prompt, from the data
sets' papers and cards (words times 1.3); good for a plan, and for nothing else.
"""

from __future__ import annotations

from typing import Any

_LLAMA: dict[str, Any] = {
    **{"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"vocab_size": 32000, "max_position_embeddings": 4096},
}
_OPT: dict[str, Any] = {"num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048}
_MPT: dict[str, Any] = {"d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50432, "max_seq_len": 2048}
_GROUPED = {**_LLAMA, "num_key_value_heads": 8, "intermediate_size": 14336}

# hub id -> (family, what differs from the family's defaults)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "cerebras/Cerebras-GPT-6.7B": ("gpt2", {"n_embd": 4096, "n_layer": 32, "n_head": 32, "n_positions": 2048}),
    "EleutherAI/gpt-j-6b": ("gptj", {"n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64}),
    "meta-llama/Llama-2-7b-hf": ("llama", _LLAMA),
    "meta-llama/Llama-2-7b-chat-hf": ("llama", _LLAMA),
    "huggyllama/llama-7b": ("llama", {**_LLAMA, "max_position_embeddings": 2048}),
    "meta-llama/Llama-3.1-8B-Instruct": (
        "llama",
        {**_GROUPED, "vocab_size": 128256, "max_position_embeddings": 131072},
    ),
    "mistralai/Mistral-7B-Instruct-v0.2": ("mistral", {**_GROUPED, "max_position_embeddings": 32768}),
    "mosaicml/mpt-7b": ("mpt", _MPT),
    "mosaicml/mpt-7b-chat": ("mpt", _MPT),
    "mosaicml/mpt-7b-storywriter": ("mpt", {**_MPT, "max_seq_len": 65536}),
    "facebook/opt-2.7b": ("opt", {**_OPT, "hidden_size": 2560, "word_embed_proj_dim": 2560, "ffn_dim": 10240}),
    "facebook/opt-6.7b": ("opt", {**_OPT, "hidden_size": 4096, "word_embed_proj_dim": 4096, "ffn_dim": 16384}),
    "Qwen/Qwen2.5-7B-Instruct": (
        "qwen2",
        {
            **{"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
            **{"num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768},
        },
    ),
    "Qwen/Qwen3-8B": (
        "qwen3",
        {
            **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
            **{"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960},
        },
    ),
}

# task -> (rows of its split, mean tokens of a prompt)
DATA: dict[str, tuple[int, int]] = {
    "cnn_dailymail": (13368, 1050),  # 781 words an article, arXiv:1704.04368
    "xsum": (11332, 600),  # 431 words, arXiv:1808.08745
    "govreport": (973, 12300),  # 9409 words, arXiv:2104.02112
    "soda": (146346, 160),  # 7.6 turns of 16 words, arXiv:2212.10465
    "gsm8k_cot": (1319, 2600),  # eight of the ten worked examples, and 60 tokens of a question
    "stories": (21990, 180),  # three fifths of 230 tokens
    "perplexity": (100, 4096),  # the task sets its own length
    # LongBench, arXiv:2308.14508, table 1: words, or Chinese characters
    **{f"longbench {name}": (rows, words * 13 // 10) for name, (rows, words) in {
        "narrativeqa": (200, 18409), "qasper": (200, 3619), "multifieldqa_en": (150, 4559),
        "multifieldqa_zh": (200, 6701), "hotpotqa": (200, 9151), "2wikimqa": (200, 4887), "musique": (200, 11214),
        "dureader": (200, 15768), "gov_report": (200, 8734), "qmsum": (200, 10614), "multi_news": (200, 2113),
        "vcsum": (200, 15380), "trec": (200, 5177), "triviaqa": (200, 8209), "samsum": (200, 6258),
        "lsht": (200, 22337), "passage_count": (200, 11141), "passage_retrieval_en": (200, 9289),
        "passage_retrieval_zh": (200, 6745), "lcc": (500, 1235), "repobench-p": (500, 4206),
    }.items()},
    # lm-eval's tasks: items of the split it takes; tokens of all choices' requests together, per example in the prompt
    "lm_eval piqa": (1838, 90),
    "lm_eval winogrande": (1267, 60),
    "lm_eval openbookqa": (500, 90),
    "lm_eval copa": (100, 40),
    "lm_eval mathqa": (2985, 400),
    "lm_eval arc_easy": (2376, 140),
    "lm_eval arc_challenge": (1172, 160),
}  # fmt: skip
