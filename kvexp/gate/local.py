"""Models in this process: `llama_cpp:FILE?cache_k=q4_0` and `transformers:FOLDER?dtype=bfloat16`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from kvexp.gate.sides import Answer, Place, Prompt, Role, Side, Token
from kvexp.generate.engine import log_softmax
from kvexp.generate.inputs import eos_ids
from kvexp.generate.llama_cpp import LlamaCpp, LlamaEngine, Weights
from kvexp.hf.chat_template import render, unusable
from kvexp.hf.gguf import tokenizer_of_header
from kvexp.hf.traits import CACHE_ARGUMENT
from kvexp.run import model_spec
from kvexp.run.model_spec import max_positions
from kvexp.run.notebook import spec_of
from kvexp.util.errors import ConfigError, did_you_mean
from kvexp.util.files import file_digest, path_of
from kvexp.util.strict_json import Json

Logits = NDArray[np.float32]


@dataclass
class Local(Side):
    """A model in this process. decode(ids, new): greedy tokens; force(ids, text): logits [N, V] of N tokens."""

    role: Role
    name: str
    context: int | None
    facts: Json = field(repr=False)
    tokenizer: Any = field(repr=False)
    ends: frozenset[int]
    decode: Callable[[Sequence[int], int], list[int]] = field(repr=False)
    force: Callable[[Sequence[int], Sequence[int]], Logits] = field(repr=False)
    note = "token by token"

    def identity(self) -> Json:
        return self.facts

    def tokenize(self, prompt: Prompt) -> list[Token]:
        if not prompt.messages:
            return list(self.tokenizer(prompt.text).input_ids)
        try:
            text = render(self.tokenizer, prompt.messages, add_generation_prompt=True)
        except Exception as error:  # jinja's, or whatever a template does with its values
            raise unusable(error, "give prompts as texts") from error
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def answer(self, prompt: Sequence[Token], new: int) -> Answer:
        tokens = self.decode([int(token) for token in prompt], new)
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return Answer(list(tokens), text, tokens[-1] in self.ends)

    def places(self, prompt: Sequence[Token], text: Sequence[Token], top: int | None) -> Iterator[Place]:
        ids, forced = ([int(token) for token in tokens] for tokens in (prompt, text))
        for row in log_softmax(self.force(ids, forced)):
            yield Place.of(self.role, range(len(row)), row)


def llama_cpp(role: Role, words: str) -> Local:
    """llama.cpp with a GGUF file and its tokenizer; options: as of `LlamaCpp`, but for weights."""
    place, options = _parted(role, words, [item.name for item in fields(LlamaCpp) if item.name != "weights"])
    settings, path = LlamaCpp(**options, weights="file"), path_of(place, role)
    weights = Weights(path)
    engine = LlamaEngine(weights, settings, threads=torch.get_num_threads())
    tokenizer, ends = tokenizer_of_header(weights.header), weights.ends

    def decode(ids: Sequence[int], new: int) -> list[int]:
        return engine.answer(ids, new, ends).tokens

    name = " ".join(("llama_cpp", path.name, *words.partition("?")[2:]))
    facts = {"file": file_digest(path), **settings.identity()}
    return Local(role, name, weights.header.integer("context_length"), facts, tokenizer, ends, decode, engine.logits)


def transformers(role: Role, words: str) -> Local:
    """A model as `kvexp run` loads it, with its full cache; options: as of `model`, such as dtype."""
    place, options = _parted(role, words, None)
    spec = spec_of(place, options)
    model, tokenizer = model_spec.load(spec)
    ends = frozenset(eos_ids(model, "model"))

    @torch.no_grad()
    def walk(ids: Sequence[int], new: int, text: Sequence[int] | None) -> tuple[list[int], list[Logits]]:
        """Tokens behind a prompt, of a text or the greedy ones, and the logits [V] in front of each."""
        cache, fed, tokens, logits = DynamicCache(), list(ids), list[int](), list[Logits]()
        while len(tokens) < new and not (text is None and ends.intersection(tokens[-1:])):
            row = model(torch.tensor([fed], device=model.device), logits_to_keep=1, **{CACHE_ARGUMENT: cache}).logits
            logits.append(row[0, -1].float().cpu().numpy())
            fed = [int(logits[-1].argmax()) if text is None else text[len(tokens)]]
            tokens += fed
        return tokens, logits

    def decode(ids: Sequence[int], new: int) -> list[int]:
        return walk(ids, new, None)[0]

    def force(ids: Sequence[int], text: Sequence[int]) -> Logits:
        return np.stack(walk(ids, len(text), text)[1])

    name = f"transformers {words}"
    return Local(role, name, max_positions(spec), spec.identity(), tokenizer, ends, decode, force)


def _parted(role: Role, words: str, known: Sequence[str] | None) -> tuple[str, dict[str, Any]]:
    """PLACE?KEY=VALUE&... as place and settings. known: the keys that there are, None where another says so."""
    place, _, query = words.partition("?")
    options = dict[str, Any]()
    for key, text in parse_qsl(query, keep_blank_values=True):
        if known is not None and key not in known:
            near = did_you_mean(key, known) or f"; there are {', '.join(known)}"
            raise ConfigError(f"{role}: {key} is no setting of this engine{near}")
        options[key] = text
        with suppress(ValueError):
            options[key] = json.loads(text)
    return place, options


ENGINES: dict[str, Callable[[Role, str], Local]] = {"llama_cpp": llama_cpp, "transformers": transformers}
