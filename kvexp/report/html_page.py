"""The page: template, style, scripts and data put into one file."""

from importlib.resources import files
from string import Template

from kvexp.errors import ConfigError
from kvexp.report.escape import digest, embed
from kvexp.report.run_index import index
from kvexp.report.section import Section
from kvexp.report.sections import (
    about,
    cost_section,
    divergence_section,
    explorer,
    kept,
    life_section,
    needle_section,
    samples,
    verdicts,
)
from kvexp.report.source import ReportSource

SECTIONS: tuple[Section, ...] = (
    verdicts.SECTION,
    explorer.SECTION,
    divergence_section.SECTION,
    life_section.SECTION,
    cost_section.SECTION,
    samples.SECTION,
    kept.SECTION,
    needle_section.SECTION,
    about.SECTION,
)
BEFORE = ("dom", "filters", "panels", "diff")  # scripts the sections use
AFTER = ("start",)


def page(source: ReportSource) -> str:
    """The HTML, in ASCII but for the scripts; the same runs give the same text."""
    found = [(section, section.data(source)) for section in SECTIONS]
    shown = [(section, data) for section, data in found if data is not None]
    names = [*BEFORE, *(section.name for section, _ in shown), *AFTER]
    scripts = [plotly(), *(asset(f"{name}.js") for name in names)]
    if any(word in script.lower() for script in scripts for word in ("</script", "<!--")):
        raise ValueError("a script holds </script or <!--, which would end its element early; take another plotly")
    data = {"runs": index(source), "sections": {section.name: data for section, data in shown}}
    return Template(asset("page.html")).substitute(
        allowed=" ".join(map(digest, scripts)),
        style=asset("page.css"),
        links="".join(f'<a href="#{section.name}">{section.title}</a>' for section, _ in shown),
        sections="".join(map(_element, (section for section, _ in shown))),
        data=embed(data),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


def _element(section: Section) -> str:
    name, title, lead = section.name, section.title, section.lead
    return f'<section id="{name}"><h2>{title}</h2><p class="lead">{lead}</p><div class="body"></div></section>\n'


def plotly() -> str:
    """plotly.js, from the Python package of that name."""
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise ConfigError("the report needs plotly, which is not installed; run: pip install 'kvexp[eval]'") from error
    return str(get_plotlyjs())


def asset(name: str) -> str:
    return files("kvexp.report").joinpath("assets", name).read_text(encoding="utf-8")
