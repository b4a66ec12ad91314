"""What is asked of a model and how its answer is scored: text in, numbers out. No model, no tokenizer, no torch."""

from kvexp.tasks.base import SAMPLES, TRUNCATIONS, Example, Task
from kvexp.tasks.cnn_dailymail import CNNDailyMail
from kvexp.tasks.context_qa import ContextQA
from kvexp.tasks.govreport import GovReport
from kvexp.tasks.govreport_sections import GovReportSections
from kvexp.tasks.gsm8k import GSM8K
from kvexp.tasks.instructions import Instructions, InstructionsLeak
from kvexp.tasks.lm_eval import LMEval
from kvexp.tasks.long_answers import LongAnswers
from kvexp.tasks.longbench import LongBench
from kvexp.tasks.needle import Needle
from kvexp.tasks.news import News
from kvexp.tasks.news_needle import NewsNeedle
from kvexp.tasks.news_qa import NewsQA
from kvexp.tasks.perplexity import Perplexity
from kvexp.tasks.questions import QUESTIONS, QuestionTask
from kvexp.tasks.soda import Soda
from kvexp.tasks.stories import Stories
from kvexp.tasks.summarization import TEMPLATES, Summarization
from kvexp.tasks.testbed import TestbedChoice, TestbedDialogue, TestbedNeedle, TestbedQA, TestbedSummary
from kvexp.tasks.turn_dialogues import Dialogue, SodaTurns
from kvexp.tasks.xsum import XSum

__all__ = [
    "GSM8K",
    "QUESTIONS",
    "SAMPLES",
    "TEMPLATES",
    "TRUNCATIONS",
    "CNNDailyMail",
    "ContextQA",
    "Dialogue",
    "Example",
    "GovReport",
    "GovReportSections",
    "Instructions",
    "InstructionsLeak",
    "LMEval",
    "LongAnswers",
    "LongBench",
    "Needle",
    "News",
    "NewsNeedle",
    "NewsQA",
    "Perplexity",
    "QuestionTask",
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
]
