"""The exhibits there are: every experiments/<paper>/<exhibit>.py with a CLAIM; EXHIBITS.md says how one is made."""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from kvexp.errors import ConfigError

HERE = Path(__file__).resolve().parents[1]  # experiments/
ROOT = HERE.parent
SCALES = ("testbed", "paper")
PAPERS = ("keyformer", "a2sf", "pqcache")  # in the order of the index
ALIASES = {"fig7": "keyformer_fig7"}  # the one that started it all; every other name carries its paper


@functools.cache
def names() -> tuple[str, ...]:
    """Every exhibit, by paper, then figures and tables in their order."""
    found = [f"{paper}_{path.stem}" for paper in PAPERS for path in HERE.glob(f"{paper}/*.py") if _claims(path)]
    return tuple(sorted(found, key=_place))


def _claims(path: Path) -> bool:
    """Whether a module has a CLAIM, without importing it."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    return any(isinstance(target, ast.Name) and target.id == "CLAIM" for target in targets)


def _place(name: str) -> tuple[int, int, int, str]:
    """keyformer_fig3a before keyformer_fig10, tables after figures, the appendix last."""
    paper, _, rest = name.partition("_")
    kind = next((i for i, word in enumerate(("fig", "table")) if rest.startswith(word)), 2)
    digits = "".join(letter for letter in rest.split("_")[0] if letter.isdigit())
    return PAPERS.index(paper), kind, int(digits or 0), rest


def load(name: str) -> ModuleType:
    """The module of an exhibit or its alias; ConfigError with the list of names for any other word."""
    name, known = ALIASES.get(name, name), names()
    if name not in known:
        raise ConfigError(f"no exhibit {name!r}; there are {', '.join(known)}, and fig7 for keyformer_fig7")
    paper, _, exhibit = name.partition("_")
    return importlib.import_module(f"experiments.{paper}.{exhibit}")


def name_of(module: ModuleType) -> str:
    _, paper, exhibit = module.__name__.split(".")
    return f"{paper}_{exhibit}"


def sweeps(module: ModuleType, scale: str) -> list[str]:
    """The options of `experiment=` whose runs the exhibit shows; empty for one that has no runs of its own."""
    own: Sequence[str] = getattr(module, "SWEEPS", (name_of(module),))
    return [name if scale == "testbed" else f"{scale}/{name}" for name in own]
