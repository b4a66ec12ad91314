"""The tokenizer that a GGUF file describes, as a Hugging Face tokenizer.

A byte-level vocabulary (tokenizer.ggml.model = gpt2) is put together here: the file names the pattern by which its
model splits text (tokenizer.ggml.pre), and another pattern would give other tokens than the model learned. A
SentencePiece vocabulary (llama) is converted by transformers. For a pattern that is not listed here there is no
tokenizer, rather than a nearly right one.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvexp.errors import ConfigError
from kvexp.models.gguf_header import GgufHeader

CONTROL, USER_DEFINED = 3, 4  # types of tokens
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# Of the published tokenizer.json files of Llama 3 and Qwen2: they differ in how many digits stand together.
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
SPLITS: dict[str, Any] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), lambda: _by(LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), lambda: _by(QWEN2)),
}
LLAMA3_SPLITS = ("llama-bpe", "llama3", "llama-v3")  # a word that is a token is that token; a start token comes first
NFC = ("qwen2", "deepseek-r1-qwen")


def tokenizer_of_header(header: GgufHeader) -> PreTrainedTokenizerBase:
    """The tokenizer that a GGUF header describes, with its chat template.

    ConfigError for a kind of vocabulary, or a pattern of splitting text, that is not known exactly.
    """
    kind = header.fields.get("tokenizer.ggml.model")
    if kind == "gpt2":
        made: PreTrainedTokenizerBase = _byte_level(header)
    elif kind == "llama":
        made = AutoTokenizer.from_pretrained(str(header.path.parent), gguf_file=header.path.name)
    else:
        raise ConfigError(
            f"its vocabulary is of kind {kind!r}; gpt2 (byte-level) and llama (SentencePiece) can be read"
        )
    template = header.fields.get("tokenizer.chat_template")
    if isinstance(template, str):
        made.chat_template = template
    return made


def _byte_level(header: GgufHeader) -> PreTrainedTokenizerBase:
    """The tokenizer of a byte-level BPE vocabulary; ConfigError as of `tokenizer_of_header`."""
    fields = header.fields
    split = fields.get("tokenizer.ggml.pre")
    if split not in SPLITS:
        raise ConfigError(f"it splits text as {split!r}; the known ways are {', '.join(SPLITS)}")
    tokens, merges = fields.get("tokenizer.ggml.tokens"), fields.get("tokenizer.ggml.merges")
    if not isinstance(tokens, list) or not isinstance(merges, list) or not all("\x20" in merge for merge in merges):
        raise ConfigError("its vocabulary has no tokens or no merges")
    known = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    backend = Tokenizer(models.BPE(vocab=known, merges=pairs, ignore_merges=split in LLAMA3_SPLITS))
    backend.pre_tokenizer = SPLITS[split]()
    backend.decoder = decoders.ByteLevel()
    if split in NFC:
        backend.normalizer = normalizers.NFC()
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        types = fields.get("tokenizer.ggml.token_type") or []
        added = [token for token, of in zip(tokens, types, strict=False) if of == kind]
        add = backend.add_special_tokens if special else backend.add_tokens
        add([AddedToken(token, special=special, normalized=False) for token in added])
    named = {
        f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if fields.get(f"tokenizer.ggml.{key}_token_id") in range(len(tokens))
    }
    if "bos_token" in named and fields.get("tokenizer.ggml.add_bos_token", split in LLAMA3_SPLITS):
        start = named["bos_token"]
        backend.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, known[start])]
                ),
            ]
        )
    longest = fields.get(f"{header.architecture}.context_length")
    made: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, model_max_length=longest, **named
    )
    return made


def _by(pattern: str) -> Any:
    """A pre-tokenizer that splits text by a regular expression, and then into bytes."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
