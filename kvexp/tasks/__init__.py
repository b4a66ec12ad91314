"""What is asked of a model and how its answer is scored: text in, numbers out. No model, no tokenizer, no torch."""

from .base import SAMPLES, TRUNCATIONS, Example, Task
from .cnn_dailymail import CNNDailyMail
from .stories import Stories
from .summarization import TEMPLATES, Summarization
from .xsum import XSum

__all__ = [
    "SAMPLES",
    "TEMPLATES",
    "TRUNCATIONS",
    "CNNDailyMail",
    "Example",
    "Stories",
    "Summarization",
    "Task",
    "XSum",
]
