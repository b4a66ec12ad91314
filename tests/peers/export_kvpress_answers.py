"""Answers of NVIDIA's kvpress by its own evaluation (its pipeline), for tests/methods/test_peers.py. Run by
`make peers`, in an environment of its own.

Writes .peers/kvpress_answers.npz: a tiny Llama model drawn here, contexts and questions as token ids, and for each
press and compression ratio the answers to all questions [contexts, questions, new tokens]. The tokenizer has a word for
each id, so that texts are ids: w7 is 7.
"""

from __future__ import annotations

import kvpress
import numpy as np
import torch
from common import GROUPED, model_of, weights_of, write
from kvpress.pipeline import KVPressTextGenerationPipeline
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

# The end token is never drawn as a word of a prompt; answers go on to the limit unless it comes.
CONFIG = GROUPED | {"vocab_size": 211, "eos_token_id": 210}
PRESSES = {
    "knorm": kvpress.KnormPress,
    "streaming_llm": lambda ratio: kvpress.StreamingLLMPress(compression_ratio=ratio, n_sink=4),
    "snapkv": lambda ratio: kvpress.SnapKVPress(compression_ratio=ratio, window_size=7, kernel_size=5),
    "expected_attention": lambda ratio: kvpress.ExpectedAttentionPress(compression_ratio=ratio, n_future_positions=31),
}
RATIOS = (0.0, 0.25, 0.5, 0.875)
SEED, CONTEXTS, WORDS, QUESTIONS, ASKED, NEW = 41, 3, 97, 2, 7, 16


def drawn() -> tuple[LlamaForCausalLM, torch.Tensor, torch.Tensor]:
    """(model, contexts [C, T], questions [Q, A]) from the seed alone; no word comes twice in a context."""
    dice = torch.Generator().manual_seed(SEED)
    model = model_of(CONFIG, dice, attention="eager")
    words = [torch.randperm(CONFIG["vocab_size"] - 2, generator=dice)[:WORDS] + 1 for _ in range(CONTEXTS)]
    asked = torch.randint(1, CONFIG["vocab_size"] - 1, (QUESTIONS, ASKED), generator=dice)
    return model, torch.stack(words), asked


def tokenizer_of_words() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(CONFIG["vocab_size"])}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="w0", eos_token=f"w{CONFIG['eos_token_id']}")


def words_of(ids: torch.Tensor) -> str:
    return " ".join(f"w{int(each)}" for each in ids)


def main() -> None:
    model, contexts, questions = drawn()
    model.generation_config.eos_token_id = CONFIG["eos_token_id"]
    tokenizer = tokenizer_of_words()
    pipeline = KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    found = weights_of(model) | {"contexts": contexts.numpy(), "questions": questions.numpy()}
    asked = [words_of(question) for question in questions]
    for name, press in PRESSES.items():
        for ratio in RATIOS:
            answers = np.full((CONTEXTS, QUESTIONS, NEW), -1)
            for c, context in enumerate(contexts):
                made = press(ratio)
                texts = pipeline(f" {words_of(context)}", questions=asked, press=made, max_new_tokens=NEW)["answers"]
                for q, text in enumerate(texts):
                    ids = [int(word.removeprefix("w")) for word in text.split()]
                    answers[c, q, : len(ids)] = ids
            found[f"{name}/{ratio}"] = answers
    write(__file__, found, case={"config": CONFIG}, presses=list(PRESSES), ratios=RATIOS)


if __name__ == "__main__":
    main()
