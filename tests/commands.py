"""run.py in this process, and what is composed of its words: for tests of what a command says and leaves behind."""

import runpy
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from composition import GROUPS
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from small import small

from kvexp.run import user_code
from kvexp.run.compose import defaults
from kvexp.run.settings import settings_of
from kvexp.util.files import CONF

RUN = Path(__file__).resolve().parents[1] / "run.py"


def run_py(monkeypatch, capsys, *words):
    """(exit code, stdout, stderr) of `python run.py WORDS`."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(RUN), run_name="__main__")
    return (stopped.value.code, *capsys.readouterr())


def config_of(*words, **how):
    """The configuration of these words, not resolved."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", list(words), **how)


def composed(*words):
    """(configuration, option taken of each group) of these words and `small.DEFAULTS`, as `settings_of` takes them."""
    words = small(*words)
    plain = OmegaConf.to_container(config_of(*words), resolve=True)
    typed = dict(word.split("=", 1) for word in words if word.split("=")[0] in GROUPS)
    choices = {group: option for group, option in (defaults() | typed).items() if option is not None}
    return {key: value for key, value in plain.items() if key not in ("log", "experiment", "diagnose")}, choices


def settings(*words, typed=()):
    """The settings of a run. typed: words of these that count as set by hand, for its labels."""
    return settings_of(*composed(*words), typed)


def admit_in_test(monkeypatch, cls):
    """Let a class that a test defines be a method or task of runs, as one that a command line has named."""
    users = user_code.AdmittedClass(cls.__name__, cls, {"class": cls.__name__, "files": {}}, None)
    monkeypatch.setitem(user_code._ADMITTED, users.target, users)


@contextmanager
def forgetting(monkeypatch, *modules):
    """Forget the classes that are admitted inside the block, these modules and the paths that were added."""
    path = list(sys.path)
    monkeypatch.setattr(user_code, "_ADMITTED", {})
    yield
    sys.path[:] = path
    for name in modules:
        sys.modules.pop(name, None)
