"""GovReport by sections: each section of a report's summary is asked for by its title."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

from kvexp.errors import ConfigError
from kvexp.tasks.base import Example, RougeTask, row_id
from kvexp.tasks.framed_questions import FramedQuestions

Sections = list[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class GovReportSections(FramedQuestions, RougeTask):
    """Write one section of a report's summary; rows {"id", "document_sections", "summary_sections"} of GovReport
    (Huang et al., arXiv:2104.02112), configuration "structure" of launch/gov_report: sections with a `title` and
    `paragraphs`, as a list of objects or as an object of lists.

    The Government Accountability Office writes its summaries in sections ("Why GAO Did This Study"): an example for
    each, `limit` counts them. Sections without a title, such as the Congressional Research Service's, are left out.
    ROUGE F1 with stemmer in percent. The hub has the rows behind a loading script, which nothing runs any more:
    name a file of them with data_files.
    """

    name: ClassVar[str] = "govreport_sections"

    question: str = "after_eviction"
    section_instruction: str = 'Write the section "{title}" of a summary of the report.'
    max_new_tokens: int = 256
    max_prompt_tokens: int | None = 8192

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if self.data_files is None and not self.hub_id:
            raise ConfigError(
                "task.data_files=FILE: name a .json, .jsonl or .parquet file of launch/gov_report's rows "
                '{"id", "document_sections", "summary_sections"} (its configuration "structure"), got none'
            )
        yield from islice(self._sections(), self.limit)

    def _sections(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for where, row in self.source.choose(None, "first", self.seed):
            report = "\n\n".join("\n".join(filter(None, each)) for each in sections(row, "document_sections", where))
            if not report.strip():
                raise ConfigError(f"{where}: field 'document_sections' holds no text; correct or remove the row")
            titled = [each for each in sections(row, "summary_sections", where) if all(each)]
            for number, (title, words) in enumerate(titled):
                made = {"id": row_id(row, "id", report), "report": report, "number": number}
                yield f"section {title!r} of {where}", made | {"title": title, "words": words}

    def example(self, row: dict[str, Any], where: str) -> Example:
        asked = self.section_instruction.replace("{title}", row["title"])
        made = self.about(f"{row['id']} section {row['number']}", row["report"], asked, row["words"])
        return replace(made, info={"section": row["title"]})

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        return self.rouge(output, reference)

    def check_options(self) -> None:
        super().check_options()
        if self.section_instruction.count("{title}") != 1:
            raise ConfigError(f"task.section_instruction must hold {{title}} once, got {self.section_instruction!r}")
        if self.sample != "first":
            raise ConfigError(
                f"task.sample must be first for govreport_sections, got {self.sample!r}: its sections have an order"
            )


def sections(row: Mapping[str, Any], field: str, where: str) -> Sections:
    """(title, text) of every section of a field, either of them perhaps empty."""
    found = row.get(field)
    if isinstance(found, Mapping):  # as `datasets` hands out a sequence of objects
        titles, words = found.get("title"), found.get("paragraphs")
        if isinstance(titles, list | tuple) and isinstance(words, list | tuple) and len(titles) == len(words):
            found = [{"title": title, "paragraphs": each} for title, each in zip(titles, words, strict=True)]
    if not isinstance(found, list | tuple) or not all(isinstance(each, Mapping) for each in found):
        shown = f"got {row[field]!r:.80}" if field in row else f"it has: {', '.join(row)}"
        raise ConfigError(f"{where}: field {field!r} must be sections with a title and paragraphs, {shown}")
    return [(_words(each, "title", where), _words(each, "paragraphs", where)) for each in found]


def _words(section: Mapping[str, Any], field: str, where: str) -> str:
    """The field's text; of a list its texts, one a line."""
    found = section.get(field) or ""
    each = [found] if isinstance(found, str) else found
    if not isinstance(each, list | tuple) or not all(isinstance(one, str) for one in each):
        raise ConfigError(f"{where}: a section's {field!r} must be a text or a list of texts, got {found!r:.80}")
    return "\n".join(one.strip() for one in each).strip()
