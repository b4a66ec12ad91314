"""The documentation as data: its commands, what must be there to run them, its links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvexp.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
OUTSIDE = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "experiments/EXHIBITS.md", "benchmarks/README.md")
PAGES = [*DOCS, *(ROOT / name for name in OUTSIDE)]
# What `<!-- needs: ... -->` in front of a block may say (real: the fetched model); `<!-- slow -->` stands there alone.
NEEDS = ("hub", "gpu", "real")
MARK = re.compile(r"<!-- *(needs: *(?P<needs>\S+)|(?P<slow>slow)) *-->")
FENCE = re.compile(r"^```(?P<kind>\w*)")
SCRIPTS = ("#!", "for ")  # how the first line of a script begins
OURS = "|".join(COMMANDS)
INLINE = re.compile(  # a line of prose may begin with "make"
    rf"(?:(?:^ {{4}}|`|^|\$\w+ )(?=python)|(?:^ {{4}}|`)(?=make|kvexp))"
    rf"(?P<command>(?:python run\.py|python -m|make) [^`\n]+|kvexp (?:{OURS})\b[^`\n]*)",
    re.MULTILINE,
)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
TITLED = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```', re.MULTILINE | re.DOTALL)
BLANK = re.compile(r"…|\.\.\.|\||<|NAME")  # to be filled in by the reader
LINK = re.compile(r"\]\((?P<file>[^)#:\s]*)(?:#(?P<anchor>[^)\s]+))?\)")


@dataclass
class Block:
    """A fenced block of commands, each with the lines it is to print (of a console block)."""

    page: Path
    line: int
    needs: str = ""
    slow: bool = False
    script: bool = False  # a shell script for another place: the commands in it are `mentioned`
    commands: list[tuple[str, list[str]]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """Every ```bash and ```console block of a page."""
    inside: Block | None = None
    kind, marked = "", None
    for number, line in enumerate(page.read_text("utf-8").splitlines(), start=1):
        fence = FENCE.match(line)
        if fence and kind:  # a block's end
            if inside is not None:
                yield inside
            inside, kind, marked = None, "", None
        elif fence:
            kind = fence["kind"] or "text"
            if kind in ("bash", "console"):
                needs, slow = (marked["needs"] or "", bool(marked["slow"])) if marked else ("", False)
                inside = Block(page, number, needs, slow)
        elif inside is not None and line.strip() and not inside.script:
            inside.script = kind == "bash" and not inside.commands and line.startswith(SCRIPTS)
            if not inside.script:
                _take(inside, kind, line)
        elif not kind and line.strip():
            marked = MARK.fullmatch(line.strip())


def _take(block: Block, kind: str, line: str) -> None:
    if kind == "bash":
        block.commands.append((line, []))
    elif line.startswith("$ "):
        block.commands.append((line[2:], []))
    else:
        block.commands[-1][1].append(line)


def mentioned(page: Path) -> list[str]:
    """Commands in scripts, indented blocks and backticks, without comments; none of a block or with blanks to fill."""
    text = re.sub(r"\\\n *", "", page.read_text("utf-8"))
    found = [re.split(r"  #| > | &", match["command"])[0].strip() for match in INLINE.finditer(text)]
    run = {command for block in blocks(page) for command, _ in block.commands}
    return [command for command in found if command not in run and not BLANK.search(command)]


def words_of(command: str) -> list[str]:
    """A command's words; one of `kvexp` as the `python` command that it stands for."""
    words = shlex.split(command)
    if words[0] != "kvexp":
        return words
    if words[1] == "run":
        return ["python", "run.py", *words[2:]]
    return ["python", "-m", *words]


def scripts(page: Path) -> list[str]:
    """The Python blocks of a page, which follow one another in one program."""
    return PYTHON.findall(page.read_text("utf-8"))


def files(page: Path) -> dict[str, str]:
    """Name -> text, of the files that a page lets its reader write: its blocks that have a title."""
    return dict(TITLED.findall(page.read_text("utf-8")))


def first_of(override: str) -> str:
    """The first value of a sweep's override; a list in brackets is one value, a variable of the shell is none yet."""
    key, equals, value = override.partition("=")
    value = re.sub(r"\$\w+", "1", value)
    if value[:1] == "[" and "],[" in value:  # lists, swept over
        return f"{key}={value.partition('],[')[0]}]"
    return f"{key}={value}" if not equals or value[:1] in ("[", "{", "'", '"') else f"{key}={value.split(',')[0]}"


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub's links name them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}
