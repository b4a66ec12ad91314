"""Tasks in the testbed's synthetic language; the same interface as the real ones, and no data to fetch."""

from .choice import TestbedChoice
from .dialogue import TestbedDialogue
from .needle import TestbedNeedle
from .qa import TestbedQA
from .summary import TestbedSummary

__all__ = ["TestbedChoice", "TestbedDialogue", "TestbedNeedle", "TestbedQA", "TestbedSummary"]
