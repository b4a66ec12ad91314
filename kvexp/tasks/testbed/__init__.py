"""Tasks in the testbed's synthetic language; the same interface as the real ones, and no data to fetch."""

from kvexp.tasks.testbed.choice import TestbedChoice
from kvexp.tasks.testbed.dialogue import TestbedDialogue
from kvexp.tasks.testbed.qa import TestbedQA
from kvexp.tasks.testbed.summary import TestbedSummary
from kvexp.tasks.testbed.testbed_needle import TestbedNeedle

__all__ = ["TestbedChoice", "TestbedDialogue", "TestbedNeedle", "TestbedQA", "TestbedSummary"]
