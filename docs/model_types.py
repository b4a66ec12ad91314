"""Generated from kvexp/hf/traits.py: the table of transformers' types in docs/models.md.

python docs/model_types.py            write it, between its two marks
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from kvexp.hf.traits import REFUSED, VERIFIED, WHOLE_PROMPTS

PAGE = Path(__file__).with_name("models.md")
BEGIN, END = "<!-- types: python docs/model_types.py -->", "<!-- end of types -->"


def table() -> str:
    """The table in Markdown: exact types in a row, then a row for each reason of a refusal."""
    rows = defaultdict(list)
    for name, why in REFUSED.items():
        rows[f"refused: {why}"].append(name)
    rows = {f"exact ({len(VERIFIED)})": sorted(VERIFIED), **rows}
    lines = ["| | `model_type` |", "|---|---|"]
    lines += [f"| {what} | {' '.join(f'`{name}`' for name in sorted(names))} |" for what, names in rows.items()]
    whole = ", ".join(f"`{name}`" for name in sorted(WHOLE_PROMPTS))
    return "\n".join([*lines, "", f"{whole}: a prompt is fed in one forward, since chunks change their states."])


def main() -> None:
    """Write the table into the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
