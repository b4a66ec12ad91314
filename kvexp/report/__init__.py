"""One HTML file of everything that was run: kvexp report outputs/ (or: make report).

The file needs no server and no network: plotly.js, the page's own scripts and the data are in it. Filters act on all
sections at once. No torch.

A section is two files and one line:

    sections/NAME.py   SECTION = Section("NAME", title, lead, data); data(source) returns what JSON can hold, or None
                       to leave the section out; NAME_section.py where another file of kvexp has that name
    assets/NAME.js     kvexp.section("NAME", (root, data, page) => draw): called once; `root` is the section's empty
                       element, `page.runs` the runs, and draw(shown) is called with the runs that pass the filters,
                       now and whenever a filter changes
    html_page.py       its SECTION in SECTIONS, in the order of the page

Whatever comes from rows or configurations is text, never markup: Python hands it over as JSON only (`escape.embed`), a
script makes elements with `kvexp.el` (text nodes) and passes what plotly shows through `kvexp.plain`. The page's
Content-Security-Policy names each script by its digest and forbids all requests, should that ever be forgotten.
"""

from kvexp.report.html_page import page
from kvexp.report.source import ReportSource, read

__all__ = ["ReportSource", "page", "read"]
