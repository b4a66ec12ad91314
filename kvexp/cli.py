"""The command `kvexp`: `kvexp run` is `python run.py`, every other command a function of its words.

Next to nothing is imported here, so that `kvexp --help` is quick and a misspelt command waits for nothing.
"""

from __future__ import annotations

import json
import pkgutil
import re
import sys
import textwrap
from collections.abc import Collection
from typing import NoReturn

from kvexp.util.errors import ConfigError, did_you_mean
from kvexp.util.files import CONF
from kvexp.util.machine import watch_torch
from kvexp.util.output import say, tells_errors, watch_pipes

COMMANDS = {  # name: the function that does it, of its words; what it does
    "run": ("", "one run, or a sweep (-m), with its full-attention baseline; all options: kvexp run --help"),
    "results": ("kvexp.results.views:main", "tables and figures of finished runs, with intervals and verdicts"),
    "advise": ("kvexp.results.advise:main", "which method and budget are safe for your prompts, with a guarantee"),
    "gate": ("kvexp.gate.command:main", "does a served build, format or port still answer as its baseline does"),
    "claim": ("kvexp.results.claims:main", "a paper's claim in one file: measured, judged, checked again"),
    "report": ("kvexp.results.report:main", "one HTML page of everything that was run"),
    "diagnose": ("kvexp.diagnose.show:main", "why a method lost an answer: gap, show, replay, explain"),
    "methods": ("kvexp.cli:methods", "the methods and what they are; kvexp methods NAME: the settings of one"),
    "tasks": ("kvexp.cli:tasks", "the tasks, and the settings of one"),
    "models": ("kvexp.cli:models", "the models, and the settings of one"),
    "fetch": ("kvexp.hf.fetch:main", "fetch a model into the cache, convert and check it"),
    "calibrate": ("kvexp.run.calibrate:calibrate_main", "keep a model's statistics, for methods that need them"),
    "lm-eval": ("kvexp.run.lm_eval_model:main", "lm-eval's own command line with the model kvexp"),
    "log": ("kvexp.results.wandb_log:main", "publish finished runs to Weights & Biases"),
    "export": ("kvexp.cli:export", "files for other programs: traces, to check a port to an engine"),
}
PARTS = {  # the same, of commands under one of the above
    "fetch llama_cpp": ("kvexp.run.engine_llama_cpp:fetch_main", "the float32 GGUF file of engine=llama_cpp, once"),
    "export trace": ("kvexp.engines.trace:main", "what a method kept, step by step, to check another engine's port"),
}

EVAL = ("pandas", "scipy", "httpx", "lm_eval", "matplotlib")  # modules that commands need and `pip install kvexp` lacks


def main() -> NoReturn:
    """Do what the command line says.

    Exit code: the command's, 1 where a package is missing, 2 where there is no such command, 130 for an interrupt.
    """
    watch_pipes()
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        sys.exit(0)
    if words[0] == "--version":
        from kvexp import __version__

        print(__version__)
        sys.exit(0)
    name = words[0]
    if name not in COMMANDS:
        print(f"error: kvexp has no command {name!r}{_nearest(name, COMMANDS)}", file=sys.stderr)
        sys.exit(2)
    if (part_name := " ".join(words[:2])) in PARTS:
        name = part_name
    rest = words[len(name.split()) :]
    sys.argv = [f"kvexp {name}", *rest]
    if name == "run":
        run()
    watch_torch()
    try:
        sys.exit(pkgutil.resolve_name((COMMANDS | PARTS)[name][0])(rest))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
    except ModuleNotFoundError as error:
        if error.name not in EVAL:
            raise
        sys.exit(f"error: kvexp {name} needs {error.name}, which is not installed; run: pip install 'kvexp[eval]'")


def _nearest(name: str, known: Collection[str]) -> str:
    """The known name that was probably meant, else all of them."""
    return did_you_mean(name, known) or f"; one of {', '.join(known)}"


def usage() -> str:
    """All commands, a line each, and those under them."""
    lines, parts = (_lines(commands) for commands in (COMMANDS, PARTS))
    return "\n".join(["usage: kvexp COMMAND ...", "", *lines, "", *parts, "", "kvexp COMMAND --help says more of one."])


def _lines(commands: dict[str, tuple[str, str]]) -> list[str]:
    return [
        textwrap.fill(f"  {name:<20} {about}", 79, subsequent_indent=" " * 23) for name, (_, about) in commands.items()
    ]


def export(words: list[str]) -> int:
    """`kvexp export` without one of its kinds."""
    kinds = {name: about for name, about in PARTS.items() if name.startswith("export ")}
    print("\n".join(["usage: kvexp export KIND ...", "", *_lines(kinds)]))
    return 0 if words[:1] in (["-h"], ["--help"]) else 2


def run() -> NoReturn:
    """`kvexp run` and `python run.py`, from sys.argv."""
    from kvexp.run.jobs import install_handler

    install_handler()  # first: the imports take their time too
    watch_torch()
    from kvexp.run.main import main as run_hydra

    run_hydra()


def tasks(names: list[str]) -> int:
    """Print what each task is, or for each of `names` every setting with its default."""
    return _listed("task", names)


def models(names: list[str]) -> int:
    """Print what each model is, or for each of `names` every setting with its default."""
    return _listed("model", names)


def methods(names: list[str]) -> int:
    """Print what each method is, or for each of `names` every setting with its default."""
    return _listed("method", names)


def described(group: str) -> dict[str, str]:
    """Option of `method`, `model` or `task` -> what it is, in a line; without importing a method, a task or a model."""
    if group == "method":
        return {name: text.partition("\n")[0].lstrip("# ") for name, text in _method_options().items()}
    known, said = dict[str, str](), list[str]()
    for line in (CONF / f"{group}s.yaml").read_text("utf-8").splitlines():
        if line.startswith("#"):
            said.append(line.lstrip("# "))
        elif option := re.match(r"([a-z]\w*):(?: *\{path: ([^,}]+))?", line):
            known[option[1]] = " ".join([f"{option[2]}:" if option[2] else "", *said]).strip()
        elif not line:
            said = []
    return known


@tells_errors(ConfigError)
def _listed(group: str, names: list[str]) -> int:
    """Print the options of a group, or the settings of some.

    Of a user's class (`kvexp.run.user_code`) its documentation and fields; its code is loaded for that, by being named.
    """
    if names[:1] in (["-h"], ["--help"]):
        print(f"usage: kvexp {group}s [NAME ...]\n\nwithout a name: all {group}s; with names: the settings of each")
        return 0
    known = described(group)
    if not names:
        for name, text in known.items():
            say(f"{name:<26} {text}")
    for text in [
        _settings_text(group, name, known[name]) if name in known else _settings_of_users(group, name, known)
        for name in names
    ]:
        say(text)
    return 0


def _settings_text(group: str, name: str, about: str) -> str:
    if group == "method":
        return f"method={name}\n{_method_options()[name]}"
    from kvexp.run.compose import option

    settings = "".join(f"{key}: {json.dumps(value)}\n" for key, value in option(group, name).items())
    return f"# {about}\n{group}={name}\n{settings}"


def _method_options() -> dict[str, str]:
    """Option of `method` -> what it is, in a comment, and its settings; without importing a method."""
    options = {path.stem: path.read_text("utf-8") for path in (CONF / "method").glob("*.yaml")}
    for block in re.split(r"^(?=\w)", (CONF / "methods.yaml").read_text("utf-8"), flags=re.MULTILINE)[1:]:
        head, _, settings = block.partition("\n")
        name, _, title = head.partition(": ")
        options[name] = f"{title}\n{textwrap.dedent(settings)}"
    return dict(sorted(options.items()))


def _settings_of_users(group: str, name: str, known: Collection[str]) -> str:
    from kvexp.run.user_code import BASES, load_class, settings_of_class

    users = load_class(group, name) if group in BASES else None
    if users is None:
        raise ConfigError(f"no {group} {name!r}{_nearest(name, known)}")
    docstring = users.cls.__doc__ or ""
    signature = f"{users.cls.__name__}("  # which dataclasses write where there is no docstring
    if not docstring or docstring.startswith(signature):
        docstring = sys.modules[users.cls.__module__].__doc__ or users.target
    title = docstring.strip().partition("\n")[0]
    settings = "".join(f"{key}: {value!r}\n" for key, value in settings_of_class(users.cls).items())
    return f"{group}={name}\n# {title}\n{settings}"


if __name__ == "__main__":
    main()
