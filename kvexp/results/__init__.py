"""Run folders become one tidy table: means, percentages of the baseline with intervals, verdicts, memory and speed."""

from kvexp.results.render import print_table, to_markdown
from kvexp.results.stats import n_needed
from kvexp.results.table import table

__all__ = ["n_needed", "print_table", "table", "to_markdown"]
