"""What is asked of a model and how its answer is scored: text in, numbers out. No model, no tokenizer, no torch."""

from .asked import QUESTIONS, Asked
from .base import SAMPLES, TRUNCATIONS, Example, Task
from .cnn_dailymail import CNNDailyMail
from .govreport import GovReport
from .gsm8k import GSM8K
from .lm_eval import LMEval
from .longbench import LongBench
from .needle import Needle
from .perplexity import Perplexity
from .soda import Soda
from .stories import Stories
from .summarization import TEMPLATES, Summarization
from .testbed import TestbedChoice, TestbedDialogue, TestbedNeedle, TestbedQA, TestbedSummary
from .xsum import XSum

__all__ = [
    "GSM8K",
    "QUESTIONS",
    "SAMPLES",
    "TEMPLATES",
    "TRUNCATIONS",
    "Asked",
    "CNNDailyMail",
    "Example",
    "GovReport",
    "LMEval",
    "LongBench",
    "Needle",
    "Perplexity",
    "Soda",
    "Stories",
    "Summarization",
    "Task",
    "TestbedChoice",
    "TestbedDialogue",
    "TestbedNeedle",
    "TestbedQA",
    "TestbedSummary",
    "XSum",
]
