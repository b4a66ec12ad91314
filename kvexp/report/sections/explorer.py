"""Quality against budget: all it draws is in the index."""

from kvexp.report.section import Section

SECTION = Section(
    "explorer",
    "Quality against budget",
    "Percent of the full cache's score, one line per method, with 95 % intervals (paired bootstrap). Black: the full "
    "cache. Red dashes: the 99 % mark. Hollow points: runs that are not finished, or of too few examples for an "
    "interval. Points of the same budget stand side by side.",
    lambda source: {},
)
