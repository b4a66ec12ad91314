"""Every command in the documentation runs, at a tiny scale; what needs a hub or a GPU composes at least."""

import contextlib
import importlib.util
import io
import json
import linecache
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from pages import DOCS, LINK, NEEDS, PAGES, ROOT, Block, anchors, blocks, files, first_of, mentioned, scripts, words_of

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
                for name in (
                    words[2],
                    f"{words[2]}.__main__",
                ):  # runpy warns where a test has it
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
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        compose("config", overrides)


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
    """Where a page's commands are typed: in the checkout, or in an empty folder with the files that it gives."""
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
    "page", [page for page in PAGES if scripts(page) and page.name != "EXHIBITS.md"], ids=lambda page: page.name
)
def test_python_of_a_page_runs(page, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(folder_of(page, tmp_path))
    known = {"__name__": "__main__"}
    for number, script in enumerate(scripts(page)):
        name = f"<{page.name} {number}>"  # as a notebook's cell, whose source is kept
        linecache.cache[name] = (len(script), None, script.splitlines(keepends=True), name)
        exec(compile(script, name, "exec"), known)
    assert capsys.readouterr().out


README = (ROOT / "README.md").read_text("utf-8")


def test_the_first_page_is_read_in_minutes():
    assert len(README.split()) <= 1200
    prose = [line for line in README.splitlines() if not line.startswith(("|", "    "))]
    assert max(map(len, prose)) <= 100


def test_the_result_on_the_first_page_is_the_recorded_one():
    found = re.search(r"<!-- measured: (\w+) -->\n((?:> .*\n)+)", README)
    recorded = json.loads((ROOT / "experiments" / "measured_real.json").read_text("utf-8"))["exhibits"][found[1]]
    assert " ".join(found[2].replace("> ", "").split()) == recorded["divergence"]["words"]
    assert f"(commit {recorded['commits'][0]})" in README


def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="mkdocs-material is not installed (the extra docs)")
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    pages = {str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*.html")}
    assert {"index.html", "concepts/index.html", "experiments/index.html", "CONTRIBUTING/index.html"} <= pages


def test_there_is_something_to_run():
    assert {page.name for page in DOCS} >= {"concepts.md", "methods.md", "protocols.md", "results.md", "faq.md"}
    assert len(BLOCKS) >= 20 and len(MENTIONED) >= 20
