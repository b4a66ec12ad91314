"""What a section of the page is; the package's docstring says how to add one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvexp.report.source import ReportSource


@dataclass(frozen=True)
class Section:
    """name: of assets/NAME.js and of the element; title, lead: the page's own words, as HTML.

    data: what its script gets, in what JSON can hold; None leaves the section out.
    """

    name: str
    title: str
    lead: str
    data: Callable[[ReportSource], Any]
