"""The tokenizer that a GGUF file describes, as a Hugging Face tokenizer.

A byte-level vocabulary (tokenizer.ggml.model = gpt2) is put together here: the file names the pattern by which its
model splits text (tokenizer.ggml.pre), and another pattern would give other tokens than the model learned. A
SentencePiece vocabulary (llama) is converted by transformers. For a pattern or a key that is not listed here there is
no tokenizer, rather than a nearly right one.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvexp.errors import ConfigError
from kvexp.models.gguf_header import GgufHeader

CONTROL, USER_DEFINED = 3, 4  # types of tokens
TYPES = {"gpt2": (1, CONTROL, USER_DEFINED, 5), "llama": (1, 2, CONTROL, USER_DEFINED, 5, 6)}  # 2 unknown, 6 a byte
NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # ours -> the file's
# Keys after "tokenizer.": read, or of tokens that no prompt of kvexp is made with.
KEYS = (
    *("ggml.model", "ggml.pre", "ggml.tokens", "ggml.token_type", "ggml.merges", "ggml.scores", "ggml.add_bos_token"),
    *(f"ggml.{name}_token_id" for name in (*NAMED.values(), "eot", "eom", "seperator", "mask", "cls")),
    *(f"ggml.{name}_token_id" for name in ("prefix", "suffix", "middle")),
    *(f"ggml.fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")),
    *("chat_template", "chat_templates"),
)
NAMED_TEMPLATE = "chat_template."  # tokenizer.chat_template.NAME: templates for other uses than a conversation
OFF = ("ggml.add_eos_token", "ggml.add_sep_token", "ggml.remove_extra_whitespaces", "ggml.precompiled_charsmap")
SPACE = {"ggml.add_space_prefix": {"gpt2": False, "llama": True}}
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


def check_tokenizer(header: GgufHeader) -> None:
    """ConfigError that says why the tokenizer which a GGUF header describes cannot be made exactly."""
    kind, fields = header.fields.get("tokenizer.ggml.model"), header.fields
    if kind not in TYPES:
        raise ConfigError(
            f"its vocabulary is of kind {kind!r}; gpt2 (byte-level) and llama (SentencePiece) can be read"
        )
    split, known = fields.get("tokenizer.ggml.pre"), SPLITS if kind == "gpt2" else (None, "default")
    if split not in known:
        raise ConfigError(f"it splits text as {split!r}; the known ways are {', '.join(map(str, known))}")
    for key, value in fields.items():
        name = key.removeprefix("tokenizer.")
        if name == key or name in KEYS or name.startswith(NAMED_TEMPLATE):
            continue
        if not (name in SPACE and value == SPACE[name][kind]) and not (name in OFF and not value):
            raise ConfigError(f"it sets {key}={str(value)[:40]}, which kvexp does not know how to follow")
    if not isinstance(fields.get("tokenizer.chat_template", ""), str):
        raise ConfigError("its chat template is no text")
    _check_vocabulary(header, kind)


def _check_vocabulary(header: GgufHeader, kind: str) -> None:
    """ConfigError for tokens, types, scores, merges or special tokens that do not fit each other."""
    fields = {
        name: header.fields.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type", "scores", "merges")
    }
    tokens, types, scores, merges = fields.values()
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ConfigError("its vocabulary has no tokens")
    if (merges is None) if kind == "gpt2" else (merges is None and scores is None):
        raise ConfigError(f"its vocabulary has no {'merges' if kind == 'gpt2' else 'scores'}")
    known = set(tokens)
    embedding = header.tensors.get("token_embd.weight")
    if len(known) != len(tokens):
        raise ConfigError("its vocabulary has a token twice")
    if embedding is not None and len(tokens) > embedding.shape[0]:
        raise ConfigError(f"its vocabulary has {len(tokens)} tokens and its embedding {embedding.shape[0]}")
    for name, values in (("token_type", types), ("scores", scores)):
        if values is not None and (not isinstance(values, list) or len(values) != len(tokens)):
            raise ConfigError(f"tokenizer.ggml.{name} is not one number for each of its {len(tokens)} tokens")
    strange = next((of for of in types or () if of not in TYPES[kind]), None)
    if strange is not None:
        raise ConfigError(f"it has tokens of type {strange}, which a vocabulary of kind {kind!r} does not have")
    if merges is not None and not isinstance(merges, list):
        raise ConfigError("its merges are no list")
    for merge in merges or ():
        parts = merge.split(" ") if isinstance(merge, str) else []
        if len(parts) != 2 or not {*parts, "".join(parts)} <= known:
            raise ConfigError(f"its merge {merge!r} is not of two tokens that make a third one of its vocabulary")
    for name in NAMED.values():
        key = f"tokenizer.ggml.{name}_token_id"
        if key in header.fields and header.fields[key] not in range(len(tokens)):
            raise ConfigError(f"{key}={header.fields[key]!r} is none of its {len(tokens)} tokens")


def tokenizer_of_header(header: GgufHeader) -> PreTrainedTokenizerBase:
    """The tokenizer that a GGUF header describes, with its chat template; ConfigError as of `check_tokenizer`."""
    check_tokenizer(header)
    if header.fields["tokenizer.ggml.model"] == "gpt2":
        made: PreTrainedTokenizerBase = _byte_level(header)
    else:
        made = _sentencepiece(header)
    template = header.fields.get("tokenizer.chat_template")
    if isinstance(template, str):
        made.chat_template = template
    return made


def _sentencepiece(header: GgufHeader) -> PreTrainedTokenizerBase:
    """The tokenizer of a SentencePiece vocabulary; ConfigError where transformers makes another one than the file's."""
    try:
        made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(header.path.parent), gguf_file=header.path.name
        )
        ids = made("a").input_ids
    except Exception as error:  # transformers' and tokenizers' own: no common base
        raise ConfigError(f"transformers cannot read it: {' '.join(str(error).split())[:200]}") from error
    start = header.fields.get("tokenizer.ggml.bos_token_id")
    wanted = start is not None and bool(header.fields.get("tokenizer.ggml.add_bos_token", True))
    if (ids[:1] == [start]) != wanted:
        raise ConfigError(
            f"the installed transformers {'leaves out' if wanted else 'adds'} its start token: a newer one may not"
        )
    return made


def _byte_level(header: GgufHeader) -> PreTrainedTokenizerBase:
    """The tokenizer of a byte-level BPE vocabulary that `check_tokenizer` has passed."""
    fields = header.fields
    split, tokens, merges = (fields[f"tokenizer.ggml.{name}"] for name in ("pre", "tokens", "merges"))
    known = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
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
        for name, key in NAMED.items()
        if f"tokenizer.ggml.{key}_token_id" in fields
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
