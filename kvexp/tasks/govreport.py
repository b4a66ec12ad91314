"""GovReport: a long report of a government agency in about a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvexp.tasks.base import Example
from kvexp.tasks.members import Members
from kvexp.tasks.summarization import Summarization


@dataclass(frozen=True, kw_only=True)
class GovReport(Summarization):
    """Summarize a report; rows {"report", "summary"}, 973 in the test split (Huang et al., arXiv:2104.02112).

    The long-context task of Keyformer (arXiv:2403.09054, Fig. 8: MPT-7B-storywriter, prompts of 8k tokens) with its
    Alpaca prompt. Its script reads the 200 rows of LongBench's gov_report instead: protocol=keyformer, which sets
    input_field=context, reference_field=answers (the first of which is the reference) and, in the hub repository,
    hub_file=data.zip; data_files may be that file, a folder with gov_report.jsonl in it, or such a file. With
    LongBench's own prompt and metric it is task=longbench task.subset=gov_report.
    """

    name: ClassVar[str] = "govreport"

    hub_id: str = "ccdv/govreport-summarization"
    hub_config: str | None = "document"
    hub_file: str | None = None
    split: str = "test"
    instruction: str = "You are given a report by a government agency. Write a one-page summary of the report."
    instruction_after: str = "Above is a report by a government agency. Write a one-page summary of the report."
    input_field: str = "report"
    reference_field: str = "summary"
    max_new_tokens: int = 512
    max_prompt_tokens: int | None = 8192

    @property
    def source(self) -> Members:
        return Members(**vars(super().source), member="gov_report", hub_file=self.hub_file)

    def example(self, row: Mapping[str, Any], where: str) -> Example:
        references = row.get(self.reference_field)
        if isinstance(references, list | tuple) and references:
            row = {**row, self.reference_field: references[0]}
        return super().example(dict(row), where)
