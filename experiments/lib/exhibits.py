"""What an exhibit is, which there are, and the experiments that they declare (EXHIBITS.md says more).

Experiments are options of `kvexp run experiment=NAME`. `python -m experiments.index` writes all of
them to conf/experiments.json, from which kvexp knows them without importing anything of this folder.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep

from kvexp.util.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parents[1]  # experiments/
ROOT = HERE.parent
DECLARED = ROOT / "conf" / "experiments.json"
REAL = "real"
SCALES = ("testbed", REAL, "paper")
OWN = "own"  # the real scale without DATA, where another task stands for the paper's
PAPERS = {  # a module of this folder each, in the order of the index
    "keyformer": "Keyformer (arXiv:2403.09054)",
    "a2sf": "A2SF (arXiv:2407.20485)",
    "pqcache": "PQCache (arXiv:2407.12820)",
}
ALIASES = {"fig7": "keyformer_fig7"}  # the one that started it all; every other name carries its paper

GROUPS = ("model", "task", "method", "protocol", "generation", "budget", "prefill")  # of conf/
Words = str | Mapping[str, str]  # words of a command line, "FIXED | SWEPT"; of several sweeps, by what follows the name


@dataclass(frozen=True)
class Exhibit:
    """One figure or table of a paper: what is claimed, the runs that show it, and how they are drawn and judged.

    name: PAPER_NAME; title: paper, number and what is shown; claim: what the paper says, with its source.
    table: the runs (`lib.tables.frame_of`), or what `measure` found -> one row per mark of the figure.
    draw: draws that table.
    holds: that table -> whether our numbers support the claim (True), contradict it (False) or leave it open (None),
        and a sentence with those numbers.
    axes: what is swept at every scale. at: scale -> the rest of its command line; a key that stands in both has the
        value of `at`, and is not swept where `at` fixes it. No scale: the exhibit has no runs.
    measure: of one job's model, prompts (token ids) and settings a frame, where scores cannot show the claim.
    divergence: the claim judged again by KL divergence (`lib.verdicts`), where the runs have one.
    testbed_only: why it has no real scale: what only the testbed's models have.
    runs_of: the exhibit whose runs it shows, if it has none of its own.
    """

    name: str
    title: str
    claim: str
    table: Callable[[pd.DataFrame], pd.DataFrame]
    draw: Callable[[pd.DataFrame, Figure], None]
    holds: Callable[[pd.DataFrame], tuple[bool | None, str]]
    axes: Words = ""
    at: Mapping[str, Words] = field(default_factory=dict)
    measure: Callable[[Any, Sequence[Sequence[int]], Any], pd.DataFrame] | None = None
    divergence: Callable[[pd.DataFrame], tuple[bool | None, str]] | None = None
    testbed_only: str = ""
    runs_of: str = ""

    @property
    def paper(self) -> str:
        """The module that declares it."""
        return self.name.partition("_")[0]

    def experiments(self, scale: str) -> dict[str, dict[str, Any]]:
        """Name -> option of every sweep at a scale (or OWN), the one of the exhibit's own name first."""
        axes = {"": self.axes} if isinstance(self.axes, str) else self.axes
        at = self.at.get(scale, {})
        folder, end = (REAL, OWN) if scale == OWN else ("" if scale == "testbed" else scale, "")
        options = {}
        for suffix, words in (dict.fromkeys(axes, at) if isinstance(at, str) else at).items():
            name = "_".join(filter(None, (self.name, suffix, end)))
            options["/".join(filter(None, (folder, name)))] = option(words, axes.get(suffix, axes[""]))
        return options


def option(words: str, axes: str = "") -> dict[str, Any]:
    """An option of `experiment=`: what the words "FIXED | SWEPT" say of the command line, and `axes` after them."""
    given, common = (_split(text) for text in (words, axes))
    fixed = common[0] | given[0]
    swept = {key: value for key, value in given[1].items() if key not in common[1]}
    swept |= {key: given[1].get(key, value) for key, value in common[1].items() if key not in given[0]}
    composed: dict[str, Any] = {}
    groups = [key for key in fixed if key in GROUPS]
    if groups:
        composed["defaults"] = [{f"override /{key}": fixed[key]} for key in groups]
    for key, value in fixed.items():
        *parents, last = key.split(".")
        if key not in groups:
            node = functools.reduce(lambda node, parent: node.setdefault(parent, {}), parents, composed)
            node[last] = yaml.safe_load(value)
    return composed | {"hydra": {"mode": "MULTIRUN", "sweeper": {"params": swept}}}


def _split(words: str) -> tuple[dict[str, str], dict[str, str]]:
    """The words that are fixed, and those behind the bar (or all, without a bar) that are swept: key -> value."""
    fixed, bar, swept = words.partition("|")
    sides = (fixed, swept) if bar else ("", fixed)
    return tuple(dict(word.split("=", 1) for word in side.split()) for side in sides)  # type: ignore[return-value]


@functools.cache
def exhibits() -> dict[str, Exhibit]:
    """Every exhibit by its name, in the order of the index."""
    modules = [importlib.import_module(f"experiments.{paper}") for paper in PAPERS]
    return {exhibit.name: exhibit for module in modules for exhibit in module.EXHIBITS}


def names() -> tuple[str, ...]:
    """Every exhibit, by paper, then figures and tables in their order."""
    return tuple(exhibits())


def full_name(name: str) -> str:
    """An exhibit's name, of it or of its alias; ConfigError with the list of names for any other word."""
    name, known = ALIASES.get(name, name), names()
    if name not in known:
        raise ConfigError(f"no exhibit {name!r}; there are {', '.join(known)}, and fig7 for keyformer_fig7")
    return name


def load(name: str) -> Exhibit:
    """The exhibit of a name or alias; ConfigError for any other word."""
    return exhibits()[full_name(name)]


def sweeps(name: str, scale: str) -> list[str]:
    """The options of `experiment=` whose runs the exhibit shows; empty for one that has no runs at this scale."""
    exhibit = load(name)
    return list(load(exhibit.runs_of or name).experiments(scale))


@functools.cache
def declared() -> dict[str, dict[str, Any]]:
    """Name -> option of every experiment of the exhibits and of `lib.sweeps`."""
    from experiments.lib.sweeps import SWEEPS

    options = {name: option(words) for name, words in SWEEPS.items()}
    for exhibit in exhibits().values():
        for scale in (*SCALES, OWN):
            options |= exhibit.experiments(scale)
    return dict(sorted(options.items()))


def params(experiment: str) -> dict[str, str]:
    """What an experiment sweeps: key -> its values, as typed."""
    swept: dict[str, str] = declared()[experiment]["hydra"]["sweeper"]["params"]
    return swept


def size_of(experiment: str) -> int:
    """How many runs an experiment is, as Hydra's grammar parts the values."""
    words = [f"{key}={values}" for key, values in params(experiment).items()]
    swept = [sweep.value() for sweep in OverridesParser.create().parse_overrides(words)]
    return math.prod(len(sweep.list) for sweep in swept if isinstance(sweep, ChoiceSweep))


def declared_text() -> str:
    """The file that kvexp reads: a line for each experiment."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(option)}" for name, option in declared().items())
    return f"{{\n{lines}\n}}\n"
