"""Quality against speed and memory: all it draws is in the index."""

from kvexp.report.section import Section

SECTION = Section(
    "cost",
    "Quality against speed and memory",
    "Up and to the left is better. The grey stairs are the Pareto front of the finished runs shown that have "
    "enough examples, by their estimates: no other is at least as good and as cheap. Intervals are 95 %, of "
    "quality alone.",
    lambda source: {},
)
