"""A tokenizer of single bytes, made in memory: lets random-weight models read any text without a download."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<s>", "</s>", "<pad>")  # ids 256, 257, 258


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """259 tokens: the 256 bytes, start, end, padding (on the left). Adds a start token to every text."""
    alphabet = sorted(ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteDecoder()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    start, end, pad = SPECIAL
    tokenizer.post_processor = TemplateProcessing(single=f"{start} $A", special_tokens=[(start, len(alphabet))])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=start, eos_token=end, pad_token=pad, padding_side="left"
    )
