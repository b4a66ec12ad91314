"""What an exhibit is, and which there are: the EXHIBITS of every experiments/PAPER/*.py (EXHIBITS.md says more)."""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvexp.util import ConfigError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parents[1]  # experiments/
ROOT = HERE.parent
SCALES = ("testbed", "real", "paper")
PAPERS = ("keyformer", "a2sf", "pqcache")  # in the order of the index
ALIASES = {"fig7": "keyformer_fig7"}  # the one that started it all; every other name carries its paper


@dataclass(frozen=True)
class Exhibit:
    """One figure or table of a paper: what is claimed, the runs that show it, and how they are drawn and judged.

    claim: what the paper says, with its source.
    table: the runs (`lib.data.frame_of`), or what `measure` found -> one row per mark of the figure.
    draw: draws that table.
    holds: that table -> whether our numbers support the claim (True), contradict it (False) or leave it open (None),
        and a sentence with those numbers.
    sweeps: the options of `experiment=` whose runs it shows; None: the one of its own name; (): it has no runs.
    measure: of one job's model, prompts (token ids) and settings a frame, where scores cannot show the claim.
    title: paper, number and what is shown; the first line of its module, where that declares no other.
    divergence: the claim judged again by KL divergence (`lib.divergence`), where the runs have one.
    real_sweeps: as sweeps, at the real scale where those differ.
    testbed_only: why it has no real scale: what only the testbed's models have.
    """

    claim: str
    table: Callable[[pd.DataFrame], pd.DataFrame]
    draw: Callable[[pd.DataFrame, Figure], None]
    holds: Callable[[pd.DataFrame], tuple[bool | None, str]]
    sweeps: tuple[str, ...] | None = None
    measure: Callable[[Any, Sequence[Sequence[int]], Any], pd.DataFrame] | None = None
    title: str = ""
    divergence: Callable[[pd.DataFrame], tuple[bool | None, str]] | None = None
    real_sweeps: tuple[str, ...] | None = None
    testbed_only: str = ""


@functools.cache
def _modules() -> dict[str, str]:
    """Every exhibit's name -> its module, without importing any."""
    found = {}
    for paper in PAPERS:
        for path in HERE.glob(f"{paper}/*.py"):
            for exhibit in _declared(path):
                found[f"{paper}_{exhibit}"] = f"experiments.{paper}.{path.stem}"
    return found


def _declared(path: Path) -> list[str]:
    """The keys of a file's EXHIBITS."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for node in (node for node in body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)):
        if ast.unparse(node.targets[0]) == "EXHIBITS":
            return [ast.literal_eval(key) for key in node.value.keys if key is not None]
    return []


@functools.cache
def names() -> tuple[str, ...]:
    """Every exhibit, by paper, then figures and tables in their order."""
    return tuple(sorted(_modules(), key=_place))


def _place(name: str) -> tuple[int, int, int, str]:
    """keyformer_fig3a before keyformer_fig10, tables after figures, the appendix last."""
    paper, _, rest = name.partition("_")
    kind = next((i for i, word in enumerate(("fig", "table")) if rest.startswith(word)), 2)
    digits = "".join(letter for letter in rest.split("_")[0] if letter.isdigit())
    return PAPERS.index(paper), kind, int(digits or 0), rest


def full_name(name: str) -> str:
    """An exhibit's name, of it or of its alias; ConfigError with the list of names for any other word."""
    name, known = ALIASES.get(name, name), names()
    if name not in known:
        raise ConfigError(f"no exhibit {name!r}; there are {', '.join(known)}, and fig7 for keyformer_fig7")
    return name


def module_of(name: str) -> str:
    """The module that declares an exhibit: "experiments.keyformer.fig7"."""
    return _modules()[full_name(name)]


def load(name: str) -> Exhibit:
    """The exhibit of a name or alias; ConfigError for any other word."""
    name = full_name(name)
    found: Exhibit = importlib.import_module(module_of(name)).EXHIBITS[name.partition("_")[2]]
    return found


def sweeps(name: str, scale: str) -> list[str]:
    """The options of `experiment=` whose runs the exhibit shows; empty for one that has no runs of its own."""
    exhibit = load(name)
    own = exhibit.real_sweeps if scale == "real" and exhibit.real_sweeps is not None else exhibit.sweeps
    own = (full_name(name),) if own is None else own
    return [each if scale == "testbed" else f"{scale}/{each}" for each in own]
