"""kvexp as it is installed: a wheel, an environment and a folder of its own, and the command `kvexp`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import tomllib
from pages import files

from kvexp import cli
from kvexp.run.compose import options
from kvexp.run.store import runs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel made of the source archive of a copy (`make dist`, but that nothing is downloaded)."""
    pytest.importorskip("build", reason="build is not installed: make setup")
    folder = tmp_path_factory.mktemp("wheel")
    left = shutil.ignore_patterns(".*", "build", "dist", "outputs", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=left)
    line = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, folder / "source"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder of an environment's commands, with that wheel and, behind it, what is installed here."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    line = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # its own .pth files count for nothing here
    return folder / "bin"


def called(installed, *words, cwd):
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [installed / words[0], *words[1:]], cwd=cwd, env=env, capture_output=True, text=True, timeout=600
    )


@pytest.mark.slow
def test_the_wheel_has_every_file_that_is_read(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("conf", "tasks/articles_data/texts", "results/assets", "tasks/testbed_models"):
        files = {path.relative_to(ROOT) for path in (ROOT / "kvexp" / folder).glob("**/*") if path.is_file()}
        assert files and {str(path) for path in files} <= names, folder
    (archive,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(archive) as held:
        tops = {name.split("/")[1] for name in held.getnames() if "/" in name}
    assert "CHANGELOG.md" in tops and not {"tests", "experiments"} & tops
    assert "kvexp/tasks/articles_data/needles.json" in names and "hydra_plugins/kvexp_shipping.py" in names


@pytest.mark.slow
def test_what_a_package_index_shows_has_no_relative_link(wheel):
    with zipfile.ZipFile(wheel) as held:
        (name,) = (name for name in held.namelist() if name.endswith(".dist-info/METADATA"))
        head, _, shown = held.read(name).decode().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in head
    assert not [link for link in re.findall(r"\]\(([^)]*)\)", shown) if not link.startswith("https://")]
    assert "![" not in shown and "95 % intervals" not in shown, "a picture, or its caption alone"
    words = re.sub(r"\W+", " ", shown)
    assert "random tokens are above 4 league" in words and words.strip().endswith("Licence Apache 2 0")


@pytest.mark.slow
def test_kvexp_run_works_outside_the_checkout(installed, tmp_path):
    done = called(installed, "kvexp", "run", "limit=1", "model=testbed_rope", "task=testbed_summary", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list(runs(tmp_path / "outputs"))) == 2  # h2o and its baseline, in the folder where it was called
    shown = called(installed, "kvexp", "results", cwd=tmp_path)
    assert shown.returncode == 0 and "h2o" in shown.stdout, shown.stderr
    where = called(installed, "python", "-c", "import kvexp; print(kvexp.__file__)", cwd=tmp_path)
    assert str(installed.parent) in where.stdout


@pytest.mark.slow
def test_an_own_method_runs_outside_the_checkout(installed, tmp_path):
    """The command's own folder is searched by Python, and not the current one: kvexp searches that."""
    (tmp_path / "keydiff.py").write_text(files(ROOT / "docs" / "new_method.md")["keydiff.py"])
    small = ("model=testbed_rope", "task=testbed_summary", "limit=1", "task.max_new_tokens=2")
    for words in ("method=keydiff.KeyDiff", "method=keydiff.py"):
        done = called(installed, "kvexp", "run", *small, words, cwd=tmp_path)
        assert done.returncode == 0 and "keydiff.KeyDiff" in done.stdout, done.stderr
    assert len(list(runs(tmp_path / "outputs"))) == 2


def test_the_lowest_versions_are_those_that_are_run():
    """Each lower bound is a pin of constraints-oldest.txt, which `make oldest` runs; torch's is told in docs."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    floors = dict(re.match(r"([\w-]+)>=([\d.]+)", line).groups() for line in wanted if ">=" in line)
    torch = floors.pop("torch")
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints-oldest.txt").read_text(), re.M))
    assert floors == pins
    said = (ROOT / "docs" / "models.md").read_text()
    major, minor = floors["transformers"].split(".")[:2]
    assert f"{major}.{minor} (`make oldest`)" in said and f"torch {torch}" in said
    assert "oldest" in (ROOT / ".ci" / "run").read_text()


def test_the_commands_are_listed_without_torch_or_hydra():
    code = (
        "import sys\nfrom kvexp.cli import main\nsys.argv = ['kvexp', '--help']\n"
        "try: main()\nexcept SystemExit: print({'torch', 'hydra', 'pandas'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert lines[-1] == "set()"
    for name in cli.COMMANDS:
        assert any(line.split()[:1] == [name] for line in lines), name


COMMANDS = [name for name in (*cli.COMMANDS, *cli.PARTS) if name not in ("run", "lm-eval")]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_calls_a_command_by_its_name(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for option in ("--help", "-h"):
        monkeypatch.setattr(sys, "argv", ["kvexp", *name.split(), option])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out = capsys.readouterr().out
        assert end.value.code == 0 and out.startswith(f"usage: kvexp {name} ")
        assert max(map(len, out.splitlines())) <= 80


def test_the_list_of_commands_fits_80_columns():
    assert max(map(len, cli.usage().splitlines())) <= 80


def test_what_setup_installs_runs_a_notebook_from_the_command_line():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.M)
    assert {"nbconvert", "nbclient", "ipykernel"} <= set(tools) & set(pins)
    assert {"mistune", "bleach", "beautifulsoup4", "pandocfilters"} <= set(pins), "what nbconvert brings"


def test_make_help_lists_every_variable():
    lines = (ROOT / "Makefile").read_text().splitlines()
    variables = [line for line in lines if re.match(r"[A-Z]+ *\?=", line)]
    assert {line.split()[0] for line in variables} >= {"DEMO", "SCALE", "DATA"} and all("## " in v for v in variables)


def command(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["kvexp", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return (stopped.value.code, *capsys.readouterr())


def test_a_command_is_misspelt(monkeypatch, capsys):
    assert command(monkeypatch, capsys, "rum") == (2, "", "error: kvexp has no command 'rum'; did you mean run?\n")
    code, _, err = command(monkeypatch, capsys, "zzz")
    assert code == 2 and "one of run, results" in err


def test_a_package_that_kvexp_alone_does_not_bring_is_named(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "kvexp.results.views", raising=False)
    monkeypatch.setitem(sys.modules, "pandas", None)
    code, _, _ = command(monkeypatch, capsys, "results")
    assert "kvexp results needs pandas" in code and "pip install 'kvexp[eval]'" in code


def test_an_interrupted_command_ends_without_a_traceback(monkeypatch, capsys):
    def interrupted(words):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "tasks", interrupted)
    assert command(monkeypatch, capsys, "tasks") == (130, "", "\ninterrupted\n")


def test_methods_are_listed_with_what_they_are(monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, "methods")
    assert code == 0 and {line.split()[0] for line in out.splitlines()} == {*options("method")}
    assert "H2O: heavy hitters by accumulated attention" in out
    code, out, _ = command(monkeypatch, capsys, "methods", "h2o")
    assert code == 0 and "recent_ratio: 0.5 # the halves of the official scripts\nimpl: real_drop" in out
    code, _, err = command(monkeypatch, capsys, "methods", "h3o")
    assert code == 2 and "no method 'h3o'" in err and err.count("\n") == 1


def test_tasks_and_models_are_listed_with_what_they_are(monkeypatch, capsys):
    for group, name, title in (("tasks", "xsum", "XSum: one-sentence summaries"), ("models", "tiny", "Random weights")):
        code, out, _ = command(monkeypatch, capsys, group)
        (line,) = (each for each in out.splitlines() if each.split()[0] == name)
        assert code == 0 and title in line and all(len(each.split()) > 2 for each in out.splitlines())
        code, out, _ = command(monkeypatch, capsys, group, name)
        assert code == 0 and f"{group[:-1]}={name}\n" in out
        assert 'kind: "random"' in out or 'hub_id: "EdinburghNLP' in out
        code, _, err = command(monkeypatch, capsys, group, f"{name}s")
        assert code == 2 and f"did you mean {name}?" in err


def test_each_part_is_under_a_command():
    assert all(name.split()[0] in cli.COMMANDS for name in cli.PARTS)
