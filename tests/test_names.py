"""One word, one meaning: no two files or classes of kvexp share a name; the glossary's names exist; old names work."""

import ast
import importlib
import re
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tiny import prompts_of, tiny

from kvexp.core import AttentionScoreSpec, Budget, EvictionContext, Method, RoPE
from kvexp.core.method import RENAMED
from kvexp.generate import GenerationParams, generate
from kvexp.methods import H2O, Full, StreamingLLM
from kvexp.models import EvictionCache
from kvexp.retrieval import Oracle
from kvexp.retrieval.base import RENAMED as RETRIEVAL_RENAMED

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "kvexp").rglob("*.py"))
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text("utf-8")
TWICE = {"__init__", "__main__", "base"}  # what every package may have

OLD = {
    "kvexp.core": ("Attention", "Geometry", "LayerState", "Ledger", "Moment", "Rotation", "Timeline"),
    "kvexp.generate": ("Context", "Decoding", "Receipt", "Variant"),
    "kvexp.models": ("JoinedCache",),
    "kvexp.core.method": ("newest_first",),
    "kvexp.retrieval.query": ("Chosen", "combined"),
    "kvexp.retrieval.kv_index": ("Index",),
}


def classes(path: Path) -> list[str]:
    return [node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ClassDef)]


def test_no_file_name_is_used_twice() -> None:
    names = Counter(path.stem for path in FILES if path.stem not in TWICE)
    assert [name for name, count in names.items() if count > 1] == []


def test_no_class_name_is_used_twice() -> None:
    where: dict[str, list[str]] = {}
    for path in FILES:
        for name in classes(path):
            where.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in where.items() if len(files) > 1} == {}


def terms() -> list[str]:
    """The first cells of the glossary's tables."""
    cells = re.findall(r"^\| ([^|]+) \|", GLOSSARY, re.MULTILINE)
    return [cell.strip() for cell in cells if cell.strip() not in ("term", "---") and not set(cell) <= set("- ")]


def test_the_glossary_says_each_word_once() -> None:
    assert len(terms()) > 30
    assert [term for term, count in Counter(terms()).items() if count > 1] == []


def test_the_glossarys_classes_are_there() -> None:
    known = {name for path in FILES for name in classes(path)}
    named = {
        name for cell in re.findall(r"^\| ([^|]+) \|", GLOSSARY, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)
    }
    assert len(named) >= 5 and named <= known, named - known


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in OLD.items() for name in names])
def test_an_old_name_works_and_says_the_new_one(module: str, name: str) -> None:
    package = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=rf"{module}\.{name} is called {module}\.\w+ now") as told:
        what = getattr(package, name)
    assert f"{module}.{what.__name__} now" in str(told[0].message) and what is getattr(package, what.__name__)


def test_a_name_that_never_was_is_an_error_as_ever() -> None:
    core = importlib.import_module("kvexp.core")
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        core.Nonsense  # noqa: B018  # that it raises is the test


with warnings.catch_warnings():  # two methods as somebody wrote them before the hooks were renamed
    warnings.simplefilter("ignore", DeprecationWarning)

    @dataclass(frozen=True)
    class OldKeyLength(Method):
        """The longest keys stay, and of these what got most attention twice over."""

        name: ClassVar[str] = "old_key_length"

        @property
        def view(self) -> AttentionScoreSpec:
            return AttentionScoreSpec()

        def allowance(self, budget: int, tokens: int) -> int:
            return budget + 1

        def birth(self, keys: torch.Tensor, positions: torch.Tensor, seeds: torch.Tensor, layer: int) -> torch.Tensor:
            return keys.norm(dim=-1)

        def rank(self, now: EvictionContext) -> torch.Tensor:
            return super().rank(now) * 2

    @dataclass(frozen=True)
    class OldWindow(StreamingLLM):
        keeps_newest: ClassVar[bool] = False  # so that it takes the general way

        def rank(self, now: EvictionContext) -> torch.Tensor:
            return super().rank(now)


@dataclass(frozen=True)
class KeyLength(Method):
    """`OldKeyLength` in the new words."""

    name: ClassVar[str] = "key_length"

    @property
    def score_spec(self) -> AttentionScoreSpec:
        return AttentionScoreSpec()

    def effective_budget(self, budget: int, tokens: int) -> int:
        return budget + 1

    def initial_score(
        self, keys: torch.Tensor, positions: torch.Tensor, seeds: torch.Tensor, layer: int
    ) -> torch.Tensor:
        return keys.norm(dim=-1)

    def priority(self, ctx: EvictionContext) -> torch.Tensor:
        return super().priority(ctx) * 2


@pytest.mark.parametrize(("old", "new"), [(OldKeyLength(), KeyLength()), (OldWindow(), StreamingLLM())])
@pytest.mark.filterwarnings("ignore:.*is called priority now:DeprecationWarning")  # what super().rank says
def test_a_method_with_hooks_under_their_old_names_evicts_the_same(old: Method, new: Method) -> None:
    model, rows, decoding = tiny("llama"), prompts_of(3, (40, 33)), GenerationParams(8, eos=None)
    runs = [generate(model, rows, method, Budget(kv_ratio=0.5), decoding=decoding) for method in (old, new)]
    assert runs[0].tokens == runs[1].tokens
    kept = [[run.cache.kept_positions(layer) for layer in range(2)] for run in runs]
    assert kept[0] == kept[1] and len(kept[0][0][0][0]) < 40


def test_a_hook_under_its_old_name_is_a_warning_where_the_class_is_made() -> None:
    with pytest.warns(DeprecationWarning, match="Mine.rank: this hook is called priority now") as told:

        class Mine(H2O):
            def rank(self, now: EvictionContext) -> torch.Tensor:
                return now.score

    assert told[0].filename == __file__ and Mine().priority.__func__ is Mine.__dict__["rank"]


OLD_HOOKS = [(H2O(), old, new) for old, new in RENAMED.items()] + [
    (Oracle(), old, new) for old, new in RETRIEVAL_RENAMED.items()
]


@pytest.mark.parametrize(("method", "old", "new"), OLD_HOOKS, ids=[old for _, old, _ in OLD_HOOKS])
def test_an_old_hook_answers_as_the_new_one(method: Method, old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{type(method).__name__}.{old} is called {new} now"):
        assert getattr(method, old) == getattr(method, new)


@pytest.mark.parametrize(
    ("cls", "old"),
    [
        (EvictionCache, "kept"),
        (EvictionCache, "resolve"),
        (EvictionCache, "several_tokens"),
        (EvictionContext, "leaving"),
        (RoPE, "shift"),
    ],
)
def test_an_old_method_is_the_new_one(cls: type, old: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"{cls.__name__}\.{old} is called (\w+) now") as told:
        found = getattr(cls, old)
    assert found is getattr(cls, str(told[0].message).split()[-2])


def test_a_cache_answers_to_the_old_names_of_what_it_holds() -> None:
    cache = EvictionCache(tiny("llama"), H2O(), Budget(kv_ratio=0.5))
    for old, new in (("timeline", "sequence"), ("ledger", "memory_tracker"), ("states", "layer_states")):
        with pytest.warns(DeprecationWarning, match=f"{old} is called {new} now"):
            assert getattr(cache, old) == getattr(cache, new)
    with pytest.warns(DeprecationWarning, match=r"Generation.ledger is called memory_tracker now"):
        assert generate(tiny("llama"), [[3, 4]], Full(), decoding=GenerationParams(1)).ledger.bytes > 0


PRIVATE = "sight|limbo|quota|timeline|ladder|rung|tempered_rows|moment|ledger|crew|tally"


def test_private_words_do_not_come_back() -> None:
    """Words that the glossary has a standard one for, as identifiers in the core and the layers above it."""
    words = set(PRIVATE.split("|"))
    found = []
    for path in FILES:
        if path.parts[-2] in ("decode", "observe", "core", "methods", "retrieval", "models", "generate"):
            text = path.read_text("utf-8")
            if not re.search(rf"\b({PRIVATE})\b", text):
                continue  # to parse every file takes seconds
            for node in ast.walk(ast.parse(text)):
                name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None)
                if name in words and path.name not in ("cache.py", "output.py"):  # where old names are kept
                    found.append(f"{path.relative_to(ROOT)}: {name}")
    assert found == []
