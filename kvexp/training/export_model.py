"""A trained model as a folder that any Hugging Face program loads: float16 weights, tokenizer, card, log."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from kvexp.testbed import LANGUAGE
from kvexp.testbed.words import END, PAD, START, UNKNOWN, vocabulary
from kvexp.training.layouts import POSITIONS
from kvexp.training.lessons import CURRICULUM


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word between spaces. Adds nothing by itself: the prompt forms write their start token."""
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(vocabulary())}, unk_token=UNKNOWN))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.add_special_tokens([AddedToken(word, special=True) for word in (PAD, START, END, UNKNOWN)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=START,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def export(model: Any, folder: Path, log: Path, facts: dict[str, Any]) -> None:
    """Write the folder whole or not at all. facts: what the card says of the training, JSON values."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    half = {name: tensor.to(torch.float16) for name, tensor in model.state_dict().items()}
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(part, state_dict=half)
    tokenizer().save_pretrained(part)
    shutil.copy(log, part / "training.jsonl")
    (part / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    (part / "README.md").write_text(card(folder.name, facts))
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def card(name: str, facts: dict[str, Any], scores: str = "") -> str:
    """The model card. experiments/testbed.py writes it again with the scores that it measures."""
    longest = CURRICULUM[facts["stage"]].high
    recall = "\n".join(f"| {kind} | {100 * value:.1f} |" for kind, value in facts["validation_recall"].items())
    return f"""# {name}

A causal language model of {facts["parameters"]:,} parameters ({facts["layout"]} layout) that knows kvexp's synthetic
language (version {LANGUAGE}) and nothing else. The weights are stored as float16; they were trained in float32.
`python -m kvexp.training {name} --out FOLDER` trains it again from scratch, `make testbed` all four.

| | |
|---|---|
| steps, tokens | {facts["steps"]:,}, about {facts["tokens"] / 1e6:.0f} million, padding included |
| documents in training | up to {longest} tokens (stage {facts["stage"] + 1} of {len(CURRICULUM)} of the curriculum) |
| data seed | {facts["seed"]} |
| device, time | {facts["device"]}, {facts["seconds"] / 60:.0f} minutes |
| torch, commit | {facts["torch"]}, {_commit(facts["commit"])} |

Share of answer tokens predicted right on unseen validation documents, the right answer so far being given:

| prompt form | % |
|---|---|
{recall}

{scores or "Not measured on its tasks yet: `python -m experiments.testbed` does."}

## What it is for

It tells which tokens an eviction method forgets and what that costs in a language whose facts are stated literally.
It knows nothing about the world, and its attention is that of a small copying model: conclusions about the order of
methods on real text have to be drawn on real models. `kvexp/testbed/__init__.py` says what carries over.

`training.json` holds the whole recipe, `training.jsonl` the log.
"""


def _commit(described: str | None) -> str:
    """What `git describe --dirty` says, for people."""
    if described is None:
        return "not of a git checkout"
    return described.replace("-dirty", " and changes that were committed after it")
