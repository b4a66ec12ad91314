"""Words for what has a code name: exhibits, and the models and tasks of their panels."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from typing import Any

from experiments.lib.exhibits import load, module_of
from kvexp.results.read import titled

MODELS = {
    "gptj_6b": "GPT-J 6B",
    "cerebras_6b7": "Cerebras-GPT 6.7B",
    "mpt_7b": "MPT-7B",
    "mpt_7b_storywriter": "MPT-7B StoryWriter",
    "mpt_7b_chat": "MPT-7B Chat",
    "llama_7b": "LLaMA 7B",
    "llama2_7b": "Llama 2 7B",
    "llama2_7b_chat": "Llama 2 7B Chat",
    "llama31_8b_instruct": "Llama 3.1 8B Instruct",
    "mistral_7b_instruct_v02": "Mistral 7B Instruct",
    "opt_2b7": "OPT 2.7B",
    "opt_6b7": "OPT 6.7B",
    "smollm2_135m": "SmolLM2 135M",
    "testbed_rope": "testbed, RoPE",
    "testbed_learned": "testbed, learned positions",
    "testbed_alibi": "testbed, ALiBi",
    "testbed_gqa": "testbed, grouped heads",
}
TASKS = {
    "cnn_dailymail": "CNN/DailyMail",
    "soda": "SODA",
    "govreport": "GovReport",
    "gsm8k_cot": "GSM8K",
    "xsum": "XSum",
    "longbench/hotpotqa_e": "HotpotQA",
    "longbench/2wikimqa_e": "2WikiMQA",
    "longbench/qasper_e": "Qasper",
    "longbench/multifieldqa_en_e": "MultiFieldQA",
    "arc_easy": "ARC-Easy",
    "copa": "COPA",
    "openbookqa": "OpenBookQA",
    "piqa": "PIQA",
    "winogrande": "WinoGrande",
    "news": "own articles",
    "news_qa": "questions on own articles",
    "news_needle": "needle in own articles",
    "testbed_summary": "summaries",
    "testbed_dialogue": "dialogues",
    "testbed_needle": "needle",
    "testbed_qa": "questions",
    "testbed_choice": "multiple choice",
}


def exhibit_title(name: str) -> str:
    """ "Keyformer, Fig. 8: ROUGE-2 of long documents ...", its own or the first line of its module."""
    told = inspect.cleandoc(importlib.import_module(module_of(name)).__doc__ or name)
    return load(name).title or told.partition("\n")[0].removesuffix(".")


def model_words(name: str) -> str:
    return MODELS.get(name, name.replace("_", " "))


def panel_title(model: str, task: str = "", asked: Iterable[Any] = ()) -> str:
    """ "GPT-J 6B: CNN/DailyMail, question in prompt"; a name that is not known has its underscores taken out.

    asked: where the question was, of the runs shown.
    """
    task, comma, rest = task.partition(", ") if ", " in task else task.partition(" ")
    known = TASKS.get(task, (task.partition("/")[2] or task).replace("_", " "))
    return titled(": ".join(filter(None, (model_words(model), f"{known}{comma}{rest.replace('_', ' ')}"))), asked)
