"""What is asked of a model and how its answer is scored: text in, numbers out. No model, no tokenizer, no torch."""

from __future__ import annotations

from typing import Any

from kvexp.tasks.babilong import BABILong
from kvexp.tasks.base import Example, QuestionTask, Task
from kvexp.tasks.dialogues import Dialogue, Instructions, InstructionsLeak, LongAnswers, SodaTurns
from kvexp.tasks.ifeval import IFEval, IFEvalArticles
from kvexp.tasks.infinitebench import InfiniteBench
from kvexp.tasks.lm_eval import LMEval
from kvexp.tasks.longbench import LongBench
from kvexp.tasks.longbench_v2 import LongBenchV2
from kvexp.tasks.mathematics import Mathematics
from kvexp.tasks.memory import Memory
from kvexp.tasks.needle import Needle, NewsNeedle
from kvexp.tasks.qa import GSM8K, ContextQA, NewsQA
from kvexp.tasks.ruler import Ruler, RulerQA
from kvexp.tasks.scbench import Retrieval, RetrievalTurns, SCBench, SCBenchTurns
from kvexp.tasks.summaries import (
    TEMPLATES,
    CNNDailyMail,
    GovReport,
    News,
    Perplexity,
    Prompts,
    Soda,
    Stories,
    Summarization,
    XSum,
)
from kvexp.tasks.testbed import TestbedChoice, TestbedDialogue, TestbedNeedle, TestbedQA, TestbedSummary

__all__ = [
    "GSM8K",
    "TEMPLATES",
    "BABILong",
    "CNNDailyMail",
    "ContextQA",
    "Dialogue",
    "Example",
    "GovReport",
    "IFEval",
    "IFEvalArticles",
    "InfiniteBench",
    "Instructions",
    "InstructionsLeak",
    "LMEval",
    "LongAnswers",
    "LongBench",
    "LongBenchV2",
    "Mathematics",
    "Memory",
    "Needle",
    "News",
    "NewsNeedle",
    "NewsQA",
    "Perplexity",
    "Prompts",
    "QuestionTask",
    "Retrieval",
    "RetrievalTurns",
    "Ruler",
    "RulerQA",
    "SCBench",
    "SCBenchTurns",
    "Soda",
    "SodaTurns",
    "Stories",
    "Summarization",
    "Task",
    "TestbedChoice",
    "TestbedDialogue",
    "TestbedNeedle",
    "TestbedQA",
    "TestbedSummary",
    "XSum",
    "defaults_of",
]


def defaults_of(target: str) -> dict[str, Any]:
    """Option -> default of the task that `_target_` names, such as kvexp.tasks.XSum."""
    defaults: dict[str, Any] = globals()[target.removeprefix(f"{__name__}.")].defaults()
    return defaults
