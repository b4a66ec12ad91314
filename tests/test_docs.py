"""Every command in the documentation runs, at a tiny scale; what needs a hub or a GPU composes at least."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import inspect
import io
import json
import re
import runpy
import subprocess
import sys
import typing
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from commands import config_of, settings
from omegaconf import OmegaConf
from pages import DOCS, LINK, NEEDS, PAGES, ROOT, Block, anchors, blocks, files, first_of, mentioned, scripts, words_of
from recordings import Recording

import kvexp.retrieval
from experiments.lib.exhibits import load
from kvexp.results.table import COST, COUNTS, FIRST, LAST, VERDICTS
from kvexp.run.batches import evaluate_run
from kvexp.run.build import build
from kvexp.run.compose import listed, options
from kvexp.util.errors import ConfigError
from kvexp.util.fields import typed

TINY = ("limit=1", "task.max_new_tokens=4")  # added to every run.py; the documentation's own limit gives way
BLOCKS = [block for page in PAGES for block in blocks(page)]
MENTIONED = sorted({(page.name, command) for page in PAGES for command in mentioned(page)})


def is_slow(block: Block) -> bool:
    """Whether a block is only composed in every run of the tests, and carried out in the slow ones.

    So are runs and nothing else, but for the first such block of a page: they differ in a setting or two.
    """

    def only_runs(one: Block) -> bool:
        words = [words_of(command) for command, _ in one.commands]
        return bool(words) and not one.needs and all(each[1] == "run.py" for each in words)

    first = next((one for one in BLOCKS if one.page == block.page and only_runs(one)), None)
    return block.slow or (only_runs(block) and block is not first)


def here(words: list[str], outputs: Path) -> list[str]:
    """The words with another folder for outputs."""
    return [re.sub(r"\boutputs\b", lambda _: str(outputs), word) for word in words]


def called(words: list[str]) -> tuple[int, str, str]:
    """A command's exit code and what it printed, in this process."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    code = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            if words[1] == "-c":
                exec(compile(words[2], "documentation", "exec"), {})
            elif words[1] == "-m":
                sys.argv = [words[2], *words[3:]]
                for name in (words[2], f"{words[2]}.__main__"):  # runpy warns where a test has it
                    if not hasattr(sys.modules.get(name), "__path__"):
                        sys.modules.pop(name, None)
                runpy.run_module(words[2], run_name="__main__", alter_sys=True)
            else:
                sys.argv = words[1:]
                runpy.run_path(str(ROOT / words[1]), run_name="__main__")
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    finally:
        sys.argv = before
    return code, out.getvalue(), err.getvalue()


def tiny(words: list[str], outputs: Path) -> list[str]:
    """run.py's words at the smallest scale. What is added stands in front: Hydra wants all overrides side by side."""
    own = [word for word in words[2:] if not word.startswith("limit=")]
    given = {word.partition("=")[0] for word in own}
    more = [word for word in TINY if word.partition("=")[0] not in given]
    return [*words[:2], f"outputs_dir={outputs}", *more, *own]


def composed(words: list[str]) -> None:
    """run.py's words name options and settings that exist. Launchers and sweepers may not be installed here."""
    given = [word for word in words[2:] if "=" in word and not word.startswith(("-", "hydra"))]
    overrides = [first_of(word) for word in given if "(" not in word]  # interval(0,1) is the sweeper's
    overrides = [word for word in overrides if not re.match(r"method=\w+\.", word)]  # the page's own file
    config_of(*overrides)


def check_named(words: list[str]) -> None:
    """A make target, a module or a configuration that exists."""
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+)(%?):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        asked = next(word for word in words[1:] if "=" not in word)
        assert any(asked == name if not more else asked.startswith(name) for name, more in targets), asked
    elif words[1] == "run.py":
        composed(words)
    else:
        assert importlib.util.find_spec(words[2]) is not None, words[2]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run in it."""
    folder = tmp_path_factory.mktemp("docs") / "outputs"
    code, _, err = called(tiny(["python", "run.py", "model=testbed_rope", "task=testbed_summary"], folder))
    assert code == 0, err
    return folder


def folder_of(page: Path, empty: Path) -> Path:
    """The folder for a page's commands: the checkout, or an empty one with the files that the page gives."""
    written = files(page)
    for name, text in written.items():
        (empty / name).write_text(text, "utf-8")
    return empty if written else ROOT


@pytest.mark.parametrize(
    "block", [pytest.param(b, id=str(b), marks=[pytest.mark.slow] if is_slow(b) else []) for b in BLOCKS]
)
def test_a_block_of_commands_runs(block, outputs, monkeypatch, tmp_path):
    monkeypatch.chdir(folder_of(block.page, tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    assert block.commands or block.script, f"{block}: an empty block"
    for command, expected in block.commands:
        words = words_of(command)
        if block.needs or words[0] == "make":
            assert block.needs in ("", *NEEDS), f"{block}: unknown need {block.needs!r}, one of {', '.join(NEEDS)}"
            check_named(words)
            continue
        way = words[1] in ("-m", "-c") or words[1].endswith(".py")
        assert words[0] == "python" and way, f"{block}: how is this run? {command}"
        words = here(words, outputs)
        code, out, err = called(tiny(words, outputs) if words[1] == "run.py" else words)
        assert code == 0 and "Traceback" not in err, f"{block}: {command}\n{out}\n{err}"
        printed = out.splitlines()
        assert not expected or printed == expected, f"{block}: {command} prints\n{out}"


@pytest.mark.parametrize("block", [block for block in BLOCKS if is_slow(block)], ids=str)
def test_what_a_slow_block_names_exists(block):
    for command, _ in block.commands:
        check_named(words_of(command))


@pytest.mark.parametrize(("page", "command"), MENTIONED)
def test_a_command_in_passing_names_what_exists(page, command):
    check_named(words_of(command))


def test_an_option_that_is_gone_is_found():
    with pytest.raises(Exception, match="method/h3o"):
        check_named(words_of("python run.py method=h3o"))
    with pytest.raises(Exception, match="tau_zero"):
        check_named(words_of("python run.py method=keyformer method.tau_zero=1"))
    with pytest.raises(AssertionError, match="reproduce_all"):
        check_named(words_of("make reproduce_all"))


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_lead_somewhere(page):
    for link in LINK.finditer(page.read_text("utf-8")):
        target = (page.parent / link["file"]).resolve() if link["file"] else page
        assert target.exists(), f"{page.name}: {link['file']}"
        assert not link["anchor"] or link["anchor"] in anchors(target), f"{page.name}: #{link['anchor']}"


# The block of EXHIBITS.md is the outline of a module.
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if scripts(page) and page.name not in ("EXHIBITS.md", "README.md")],
    ids=lambda page: page.name,
)
def test_python_of_a_page_runs(page, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(folder_of(page, tmp_path))
    known = {"__name__": "__main__"}
    for number, script in enumerate(scripts(page)):
        exec(compile(script, f"<{page.name} {number}>", "exec"), known)
    assert capsys.readouterr().out


README = (ROOT / "README.md").read_text("utf-8")


def test_the_first_page_is_read_in_minutes():
    assert len(README.split()) <= 800
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL).splitlines()
    assert max(len(line) for line in prose if not line.startswith(("|", "    "))) <= 100


def test_the_changelog_is_read_in_minutes():
    assert len((ROOT / "CHANGELOG.md").read_text("utf-8").split()) <= 900


def test_all_pages_have_at_most_43000_words():
    """Every Markdown file of the repository but docs/methods.md, which is generated."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    pages = [ROOT / name for name in listed.stdout.split() if name != "docs/methods.md"]
    words = {str(page.relative_to(ROOT)): len(page.read_text("utf-8").split()) for page in pages if page.exists()}
    assert len(words) > 40
    assert sum(words.values()) <= 43_000, sorted(words.items(), key=lambda item: -item[1])[:20]


def test_the_version_is_told_alike():
    for name, words in (("CITATION.cff", "version: "), ("CHANGELOG.md", "## ")):
        assert f"\n{words}{kvexp.__version__}\n" in (ROOT / name).read_text("utf-8"), name


def test_the_design_card_holds(tmp_path):
    """Packages are required and imported (evaluate by lm-eval's metrics), what stands on top is there, commands run."""
    imported = {"torch", "transformers", "datasets", "rouge_score", "lm_eval", "wandb", "pandas"}
    listed = re.findall(r'^    "([\w-]+)', (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
    required = {name.replace("-", "_") for name in listed}
    assert imported | {"hydra_core", "evaluate"} <= required
    code = "\n".join(path.read_text("utf-8") for path in (ROOT / "kvexp").rglob("*.py"))
    assert imported | {"hydra"} <= {*re.findall(r"^ *(?:import|from) (\w+)", code, re.M)}
    assert any(line.startswith("evaluate") for line in importlib.metadata.requires("lm-eval"))
    tops = ["conf", "kvexp", "experiments", "notebooks", "tests", "run.py", "pyproject.toml", "Makefile", "README.md"]
    assert [name for name in tops if not (ROOT / name).exists()] == []  # the first run makes outputs/
    sweep = words_of("python run.py -m method=keyformer,h2o,a2sf kv_ratio=0.2,0.5,0.7 model=testbed_rope")
    code, out, err = called([*tiny([*sweep, "task=testbed_summary"], tmp_path), "--dry-run"])
    assert code == 0 and "0 done, 0 partly, 10 to do" in out, err
    check_named(["make", "reproduce-fig7"])
    assert load("fig7").name == "keyformer_fig7"


@pytest.mark.real
def test_the_first_pages_python_prints_what_it_shows(smollm2, capsys):
    (script,) = scripts(ROOT / "README.md")
    (shown,) = re.findall(r"```python\n.*?```\n\n```text\n(.*?)```", README, re.DOTALL)
    assert "smollm2_135m" in script
    exec(compile(script, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    # Method, MiB and how each answer begins; another processor's last digits may turn a later token.
    begins = [[line[:60] for line in text.splitlines()] for text in (printed, shown)]
    assert begins[0] == begins[1]


def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="mkdocs-material is not installed (the extra docs)")
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    pages = {str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*.html")}
    assert f"<title>kvexp {kvexp.__version__}" in (tmp_path / "site" / "index.html").read_text("utf-8")
    assert {"index.html", "concepts/index.html", "experiments/index.html", "CONTRIBUTING/index.html"} <= pages


# What the documentation says of methods, tasks, protocols, rows and tables, held against the code.


CONF = ROOT / "conf"
METHODS = (ROOT / "docs" / "methods.md").read_text("utf-8")
PROTOCOLS = (ROOT / "docs" / "protocols.md").read_text("utf-8")
RESULTS = (ROOT / "docs" / "results.md").read_text("utf-8")
PAPERS = {path.stem: OmegaConf.to_container(OmegaConf.load(path)) for path in (CONF / "protocol").glob("*.yaml")}
PRESETS = {**PAPERS, **listed("protocol_task")}
MADE = ("benchmarks/results",)  # there once something was measured
CLASSES = [getattr(package, name) for package in (kvexp.methods, kvexp.retrieval) for name in package.__all__]


def named(key: str, page: str) -> bool:
    """Whether the page has this word between backticks, alone or in front of a value."""
    return re.search(rf"`[^`\n]*(?<![\w]){re.escape(key)}(?![\w])[^`\n]*`", page) is not None


PAGE = runpy.run_path(str(ROOT / "docs" / "methods.py"))


def test_the_page_of_methods_is_current():
    assert PAGE["text"]() == METHODS, "run: python docs/methods.py"


def test_the_options_of_methods_are_current():
    written = (CONF / "methods.yaml").read_text("utf-8")
    assert written == PAGE["options"](PAGE["entries"]()), "run: python docs/methods.py"


def test_what_methods_were_compared_with_is_what_the_recordings_hold():
    """The table's last column claims each recording and export that there is, and no other."""
    # The README's last table has those that were computed from a description of the releases.
    _, computed = (ROOT / "tests" / "golden" / "README.md").read_text("utf-8").split("computed as")
    recordings = {path for path in (ROOT / "tests" / "golden").glob("*.npz") if f"`{path.name}`" not in computed}
    recent = sorted((ROOT / "tests" / "fixtures").glob("authors_*.npz"))
    recordings.update(recent)
    named = {path: [one for one in PAGE["AUTHORS"] if str(path).startswith(f"{ROOT}/{one}")] for path in recordings}
    assert all(len(names) == 1 for names in named.values())
    assert {name for names in named.values() for name in names} == set(PAGE["AUTHORS"])
    for path in recent:
        held = sorted(name for name, value in Recording(path).config.items() if "cases" in str(value))
        assert sorted(PAGE["AUTHORS"][f"tests/fixtures/{path.name}"]) == held

    parts = Recording("kvpress").config["parts"]
    presses = {name: set(part.get("presses", ())) & set(options("method")) for name, part in parts.items()}
    presses["kvzip"] = {name for part in parts if part.startswith("kvzip") for name in ("kvzip", "kvzip_plus")}
    wrapped = set().union(*PAGE["KVPRESS"].values())
    assert all(set(claimed) <= presses[name] for name, claimed in PAGE["KVPRESS"].items())
    assert set().union(*presses.values()) <= wrapped


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.name)
def test_a_docstring_has_a_source_and_its_switches_exist(cls):
    told = inspect.getdoc(cls)
    assert re.search(r"arXiv:\d{4}\.\d{5}|PMLR \d+", told) or cls.name == "full" or "no paper" in told, "no source"
    hints = typing.get_type_hints(cls)
    fields = {field.name for field in dataclasses.fields(cls)}
    for key, value in re.findall(r"(?<![\w.])(\w+)=([\w.]+)", told.replace('"', "")):
        if key in fields:
            typed(_plain(value), hints[key], f"{cls.name}.{key}")
        else:
            assert key in ("mode", "positions", "every", "at_prefill", "keep"), f"{cls.name} has no {key}={value}"


def _plain(value: str) -> object:
    """A word of a docstring as yaml reads it; Python's False and True are yaml's too."""
    return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value.rstrip('.')}"]))["value"]


@pytest.mark.parametrize("task", options("task"))
def test_every_task_is_in_the_table(task):
    assert re.search(rf"^\|.*`{task}`", PROTOCOLS, re.MULTILINE)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_all_that_a_protocol_sets_is_told(preset):
    node = PRESETS[preset]
    paper = next(name for name in PAPERS if preset.startswith(name))
    rows = PROTOCOLS.partition(f"| `{paper}` (arXiv")[2]
    section = re.split(r"\n\| `\w+` \(arXiv|\n\n", rows)[0]
    keys = {key for value in node.values() if isinstance(value, dict) for key in value}
    keys |= {key for key, value in node.items() if not isinstance(value, dict)}
    for key in keys - {"defaults", "paper", "tasks"}:
        assert named(key, section) or (key == "limit" and "all rows" in section), f"{preset} sets {key}"
    for task in node.get("protocol", {}).get("tasks", []):
        assert f"`{task}`" in section, task


@pytest.fixture(scope="module")
def row(tmp_path_factory):
    """A row of a retrieval method, whose receipt has everything, and of a task that chooses."""
    words = ["model=testbed_rope", "task=testbed_choice", "method=oracle", "limit=1"]
    words.append(f"outputs_dir={tmp_path_factory.mktemp('out')}")
    (made,) = evaluate_run(settings(*words)).rows()
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
    source = (ROOT / "kvexp" / "run" / "store.py").read_text("utf-8")
    files = set(re.findall(r"\"([a-z.]+\.jsonl?)\"", source)) - {".json"}
    assert {"config.json", "examples.jsonl", "divergence.jsonl"} <= files
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


def test_a_decision_has_its_three_parts():
    entries = re.split(r"^### ", (ROOT / "DECISIONS.md").read_text("utf-8"), flags=re.M)[1:]
    for entry in entries:
        parts = re.findall(r"^\*\*(\w+):\*\* \S", entry, re.M)  # behind the context
        assert parts == ["So", "Reopen"] and entry.splitlines()[2][:1] not in "*", entry.partition("\n")[0]
    assert len({entry.partition("\n")[0] for entry in entries}) == len(entries) > 0


# What docs/answers.md says of its commands' output, where it is more than a score, holds on the first examples.


ANSWERS_PAGE = next(page for page in DOCS if page.name == "answers.md")
COMMANDS = [command for block in blocks(ANSWERS_PAGE) for command, _ in block.commands]


@pytest.fixture
def rows(tmp_path: Path):
    """Run the one command of the page that has these words; label of each run -> its rows, of two examples."""

    def ran(*words: str) -> dict[str, list[dict[str, Any]]]:
        (command,) = (each for each in COMMANDS if all(word in each for word in words))
        overrides = [word for word in words_of(command)[2:] if not word.startswith(("limit=", "-m"))]
        own = ["limit=2", "divergence=false", f"outputs_dir={tmp_path}"]
        code, _, err = called(["python", "run.py", "-m", *own, *overrides])
        assert code == 0, err
        found = {}
        for folder in tmp_path.glob("*/config.json"):
            labels = json.loads(folder.read_text("utf-8"))["labels"]
            text = (folder.parent / "examples.jsonl").read_text("utf-8")
            found[f"{labels['method']} {labels['setting']}"] = [json.loads(line) for line in text.splitlines()]
        return found

    return ran


def of(found: dict[str, list[dict[str, Any]]], *words: str) -> list[dict[str, Any]]:
    """The rows of the one run whose label has these words."""
    (label,) = (label for label in found if all(word in label for word in words))
    return found[label]


def receipts(rows: list[dict[str, Any]], field: str) -> list[Any]:
    return [row["receipt"][field] for row in rows]


def test_an_answer_of_one_token_does_not_feel_eviction_unless_the_question_comes_after_it(rows) -> None:
    found = rows("task.max_new_tokens=1")
    for place, same in (("in_prompt", True), ("after_eviction", False)):
        full = [row["output_tokens"] for row in of(found, "full", place)]
        for method in ("window", "h2o"):
            run = of(found, method, place)
            assert receipts(run, "first_eviction_step") == [0, 0]
            assert ([row["output_tokens"] for row in run] == full) == same, (method, place)


def test_hiding_keeps_the_same_tokens_and_more_bytes_than_the_full_cache(rows) -> None:
    found = rows("cache.mode=overwrite,mask")
    full, drops, hides = of(found, "full"), of(found, "mode=overwrite"), of(found, "mode=mask")
    assert receipts(drops, "slots") == receipts(hides, "slots")
    assert receipts(drops, "kept_digest") == receipts(hides, "kept_digest")
    assert [row["output"] for row in drops] == [row["output"] for row in hides]
    for less, all_of_it, more in zip(*(receipts(each, "kv_bytes") for each in (drops, full, hides)), strict=True):
        assert less < all_of_it <= more


def test_what_chooses_once_grows_with_the_answer(rows) -> None:
    found = rows("method=snapkv,h2o", "budget.tokens=64")
    for once, each_step in zip(of(found, "snapkv"), of(found, "h2o"), strict=True):
        assert each_step["receipt"]["slots"] == 63
        assert once["receipt"]["slots"] == 63 + once["new_tokens"] - 1


def test_blocks_of_rows_choose_what_the_whole_matrix_chooses(rows) -> None:
    found = rows("cache.observe=blocked,naive")
    assert receipts(of(found, "blocked"), "kept_digest") == receipts(of(found, "naive"), "kept_digest")


def scores_of(command: str) -> list[str]:
    """The scores that the page says the command shows: numbers with a decimal point in the sentences after its block.

    Sentences about a real model are another measurement.
    """
    after = ANSWERS_PAGE.read_text("utf-8").partition(f"{command}\n```\n")[2].split("\n## ")[0]
    sentences = re.split(r"(?<=[.)])\s+(?=[A-Z])", after.strip().split("\n\n")[0])
    return re.findall(r"\d+\.\d+", " ".join(each for each in sentences if "real model" not in each))


@pytest.mark.slow
@pytest.mark.parametrize("command", [each for each in COMMANDS if scores_of(each)], ids=lambda command: command[14:60])
def test_the_pages_scores_are_the_printed_ones(command: str, tmp_path: Path) -> None:
    """The whole command; the page may round further than the table."""
    words = [word for word in words_of(command)[2:] if word != "-m"]
    code, out, err = called(["python", "run.py", "-m", f"outputs_dir={tmp_path}", *words])
    assert code == 0, err
    out += called(["python", "-m", "kvexp", "results", str(tmp_path), "--full"])[1]
    printed = [float(number) for number in re.findall(r"\d+\.\d+", out)]

    def shown(score: str) -> bool:
        half = 0.5 * 10.0 ** -len(score.partition(".")[2])
        return any(abs(number - float(score)) <= half * (1 + 1e-9) for number in printed)

    assert [score for score in scores_of(command) if not shown(score)] == [], out


# The glossary says each word once, and its classes exist.


FILES = sorted([*(ROOT / "kvexp").rglob("*.py"), *(ROOT / "experiments" / "studies").glob("*.py")])
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text("utf-8")


def classes(path: Path) -> list[str]:
    return [node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ClassDef)]


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
