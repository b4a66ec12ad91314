"""What the documentation says of methods, tasks, protocols, rows and tables, held against the code."""

import dataclasses
import inspect
import json
import re
import runpy
import typing

import numpy as np
import pytest
from conftest import SHARED
from golden.make import MADE as MADE_RECORDINGS
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from pages import PAGES, ROOT

import kvexp.methods
import kvexp.retrieval
from kvexp.build import build, typed
from kvexp.config.settings import settings_of
from kvexp.errors import ConfigError
from kvexp.evaluate.evaluate_run import evaluate_run
from kvexp.results.table import COST, COUNTS, FIRST, LAST, VERDICTS

CONF = ROOT / "conf"
METHODS = (ROOT / "docs" / "methods.md").read_text("utf-8")
PROTOCOLS = (ROOT / "docs" / "protocols.md").read_text("utf-8")
RESULTS = (ROOT / "docs" / "results.md").read_text("utf-8")
PRESETS = sorted([*(CONF / "protocol").glob("*.yaml"), *(CONF / "protocol_task").glob("*.yaml")])
MADE = ("benchmarks/results",)  # there once something was measured
CLASSES = [getattr(package, name) for package in (kvexp.methods, kvexp.retrieval) for name in package.__all__]


def named(key: str, page: str) -> bool:
    """Whether the page has this word between backticks, alone or in front of a value."""
    return re.search(rf"`[^`\n]*(?<![\w]){re.escape(key)}(?![\w])[^`\n]*`", page) is not None


PAGE = runpy.run_path(str(ROOT / "docs" / "methods.py"))


def test_the_page_of_methods_is_current():
    assert PAGE["text"]() == METHODS, "run: python docs/methods.py"


def test_what_methods_were_compared_with_is_what_the_recordings_hold():
    """The table's last column claims each recording and export that there is, and no other."""
    computed = {make.__name__ for make in MADE_RECORDINGS}
    recordings = {path for path in (ROOT / "tests" / "golden").glob("*.npz") if path.stem not in computed}
    recordings.add(ROOT / "tests" / "fixtures" / "authors_2025.npz")
    assert {ROOT / name for name in PAGE["AUTHORS"]} == recordings
    with np.load(ROOT / "tests" / "fixtures" / "authors_2025.npz") as file:
        about = json.loads(str(file["about"]))
    held = sorted(name for name, value in about.items() if isinstance(value, dict) and "cases" in value)
    assert sorted(PAGE["AUTHORS"]["tests/fixtures/authors_2025.npz"]) == held

    methods = {path.stem for path in (CONF / "method").glob("*.yaml")}
    exported = {}
    for path in sorted((ROOT / "tests" / "peers").glob("export_*.py")):
        presses = set(re.findall(r'^ +"(\w+)": .*(?:Press|DrawnQFilters)\b', path.read_text("utf-8"), re.M))
        exported[f"tests/peers/{path.name}"] = presses & methods
    wrapped = set().union(*PAGE["KVPRESS"].values())
    for name, presses in exported.items():
        claimed = set(PAGE["KVPRESS"].get(name, ()))
        assert claimed <= presses | ({"kvzip", "kvzip_plus"} if name.endswith("kvzip.py") else set()), name
        assert presses <= wrapped, name
    assert set(PAGE["KVPRESS"]) <= set(exported)


@pytest.mark.skipif(not (SHARED / "golden").is_dir(), reason=f"no recordings at {SHARED / 'golden'}")
def test_the_recordings_that_are_not_carried_along_were_there():
    names = [path.stem for path in (SHARED / "golden").glob("*.npz")]
    for start in PAGE["NOT_CARRIED"]:
        assert any(name.startswith(start) for name in names), start


def test_every_method_has_an_oracle_as_the_page_says():
    """Those that choose nothing, or are another's with other settings, need none."""
    told = {path.stem for path in (CONF / "method").glob("*.yaml")}
    oracles = "".join(
        (ROOT / "tests" / f"test_{name}.py").read_text("utf-8") for name in ("kept_sets", "retrieval_oracles")
    )
    for cls in CLASSES:
        if cls.name in told and cls.name != "full":
            assert re.search(rf"\b{cls.__name__}\b", oracles), cls.name


@pytest.mark.parametrize("path", sorted((CONF / "method").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_method_and_each_of_its_settings_is_told(path):
    assert f"](#{path.stem})" in METHODS
    section = METHODS.partition(f"\n### {path.stem}\n")[2].partition("\n### ")[0]
    assert section
    for key in set(OmegaConf.load(path)) - {"_target_"}:
        assert f"`method.{key}`" in section, key


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.name)
def test_a_docstring_has_a_source_and_its_switches_exist(cls):
    told = inspect.getdoc(cls)
    assert re.search(r"arXiv:\d{4}\.\d{5}", told) or cls.name == "full" or "no paper" in told, "no source"
    hints = typing.get_type_hints(cls)
    fields = {field.name for field in dataclasses.fields(cls)}
    for key, value in re.findall(r"(?<![\w.])(\w+)=([\w.]+)", told.replace('"', "")):
        if key in fields:
            typed(_plain(value), hints[key], f"{cls.name}.{key}")
        else:
            assert key in ("mode", "positions", "every", "at_prefill"), f"{cls.name} has no {key}={value}"


def _plain(value: str) -> object:
    """A word of a docstring as yaml reads it; Python's False and True are yaml's too."""
    return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value.rstrip('.')}"]))["value"]


@pytest.mark.parametrize("path", sorted((CONF / "task").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_task_is_in_the_table(path):
    assert re.search(rf"^\|.*`{path.stem}`", PROTOCOLS, re.MULTILINE)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_all_that_a_protocol_sets_is_told(path):
    node = OmegaConf.to_container(OmegaConf.load(path))
    paper = next(each.stem for each in (CONF / "protocol").glob("*.yaml") if path.stem.startswith(each.stem))
    rows = PROTOCOLS.partition(f"| `{paper}` (arXiv")[2]
    section = re.split(r"\n\| `\w+` \(arXiv|\n\n", rows)[0]
    keys = {key for value in node.values() if isinstance(value, dict) for key in value}
    keys |= {key for key, value in node.items() if not isinstance(value, dict)}
    for key in keys - {"defaults", "paper", "tasks"}:
        assert named(key, section) or (key == "limit" and "all rows" in section), f"{path.stem} sets {key}"
    for task in node.get("protocol", {}).get("tasks", []):
        assert f"`{task}`" in section, task


@pytest.fixture(scope="module")
def row(tmp_path_factory):
    """A row of a retrieval method, whose receipt has everything, and of a task that chooses."""
    words = [
        "model=testbed_rope",
        "task=testbed_choice",
        "method=oracle",
        "limit=1",
        f"outputs_dir={tmp_path_factory.mktemp('out')}",
    ]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = OmegaConf.to_container(compose("config", words), resolve=True)
    given = {key: value for key, value in config.items() if key not in ("log", "experiment", "diagnose")}
    (made,) = evaluate_run(settings_of(given, {"task": "testbed_choice", "model": "testbed_rope"})).rows()
    return made


def test_every_field_of_a_row_is_told(row):
    table = RESULTS.partition("## A row")[2].partition("## The table")[0]
    assert {"choices", "receipt"} <= set(row) and row["receipt"]["retrieval"]
    for key in (*row, *row["seconds"], *row["receipt"], *row["receipt"]["retrieval"]):
        assert named(key, table), key


def test_every_column_of_the_table_is_told():
    table = RESULTS.partition("## The table")[2]
    for key in (*FIRST, *COUNTS, *VERDICTS, *COST, *LAST, "tokens", "setting", "revision"):
        assert named(key, table), key


def test_every_file_of_a_run_folder_is_told():
    source = "".join(path.read_text("utf-8") for path in sorted((ROOT / "kvexp" / "record").glob("*.py")))
    files = set(re.findall(r"\"([a-z.]+\.jsonl?)\"", source)) - {".json"}
    assert {"config.json", "examples.jsonl", "quarantine.jsonl"} <= files
    for name in files:
        assert name in RESULTS.partition("## Identity")[0], name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_that_a_page_names_are_there(page):
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    roots = "kvexp|conf|tests|experiments|benchmarks|docs|hydra_plugins"
    for name in re.findall(rf"`((?:{roots})/[\w./{{}}-]*)`", text):
        if name not in MADE and not re.search(r"NAME|[{<]", name):
            assert (ROOT / name).exists() or (ROOT / f"{name}.yaml").exists(), f"{page.name}: {name}"


def test_a_class_that_is_not_exported_and_an_import_that_fails_are_told_apart(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"no kvexp\.methods\.H3O; a new .* imported in kvexp/methods/__in"):
        build({"_target_": "kvexp.methods.H3O"}, "method", within="kvexp.methods")
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found\n")
    monkeypatch.setattr(kvexp.methods, "__path__", [*kvexp.methods.__path__, str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        build({"_target_": "kvexp.methods.broken.H2O"}, "method", within="kvexp.methods")
    with pytest.raises(ConfigError, match=r"there is no kvexp\.methods\.gone\.H2O"):
        build({"_target_": "kvexp.methods.gone.H2O"}, "method", within="kvexp.methods")


def test_the_index_of_decisions_has_every_entry_of_its_pages():
    index = (ROOT / "DECISIONS.md").read_text("utf-8")
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    listed = re.findall(r"\| (20\d\d-.*) \|$", index, re.M)
    entries = [head for page in pages for head in re.findall(r"^## (20\d\d-.*)$", page.read_text("utf-8"), re.M)]
    assert entries and sorted(listed) == sorted(entries)
