"""lm-eval's own command line with kvexp's model: `kvexp lm-eval --model kvexp --model_args … --tasks …`.

Two options are added: --data_dir FOLDER reads local files NAME.SPLIT.jsonl in place of the hub's data, and
--fewshot_split SPLIT says where examples are drawn. What is wrong with the model's arguments or the tasks is said
before the model loads, which lm-eval by itself does first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvexp.errors import CacheError, ConfigError
from kvexp.terminal import say


def main(argv: list[str]) -> int:
    """`kvexp lm-eval`: lm-eval's own command line with the model kvexp; 1 for what cannot be done, which is told."""
    try:
        run_lm_eval(argv)
    except (ConfigError, CacheError) as error:
        say(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run_lm_eval(arguments: list[str]) -> None:
    """Run lm-eval with these arguments."""
    from kvexp.tasks.lm_eval import package

    package.require()
    from lm_eval.__main__ import cli_evaluate

    import kvexp.lm_eval.kvexp_lm  # noqa: F401  # registers the model

    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--data_dir")
    own.add_argument("--fewshot_split")
    mine, rest = own.parse_known_args(arguments)
    theirs = _read(rest)
    with contextlib.ExitStack() as stack:
        if theirs.tasks:
            if theirs.model == "kvexp":
                rest = _check_model(theirs.model_args, rest)
            folder = Path(stack.enter_context(TemporaryDirectory()))
            changed = _check_tasks(theirs, mine, folder)
            if changed:
                rest += ["--include_path", str(folder)]
                logging.getLogger("lm_eval.tasks._index").setLevel(logging.ERROR)  # it would warn of each file
            if theirs.device is None:
                import torch

                rest += ["--device", "cuda:0" if torch.cuda.is_available() else "cpu"]
        sys.argv = [sys.argv[0], *rest]
        cli_evaluate()


def _read(rest: list[str]) -> argparse.Namespace:
    """What of lm-eval's own options is looked at here."""
    seen = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    seen.add_argument("--model", "-M")
    seen.add_argument("--model_args", "-a", nargs="+", default=[])
    seen.add_argument("--tasks", "-t", nargs="+", default=[])
    seen.add_argument("--num_fewshot", "-f", type=int)
    seen.add_argument("--include_path")
    seen.add_argument("--device")
    known, _ = seen.parse_known_args(rest)
    return known


def _check_model(words: Sequence[str], rest: list[str]) -> list[str]:
    """ConfigError for wrong `--model_args` (words); returns the command line with a user's method by its option.

    The code of a user's method is loaded for that, since somebody has typed its name.
    """
    from lm_eval.utils import simple_parse_args_string

    from kvexp.lm_eval.arguments import check_arguments
    from kvexp.user_methods import admit, load_method

    given: dict[str, Any] = {}
    for word in words:
        given |= json.loads(word) if word.startswith("{") else simple_parse_args_string(word)
    typed = given.get("method")
    method = load_method(typed) if isinstance(typed, str) else None
    if method is not None:
        given["method"] = admit(method).option
        named = re.compile(rf"(\bmethod(?:=|\"\s*:\s*\")){re.escape(str(typed))}(?![\w.:])")
        rest = [named.sub(rf"\g<1>{method.option}", word) if word in words else word for word in rest]
    check_arguments(given)
    return rest


def _check_tasks(theirs: argparse.Namespace, mine: argparse.Namespace, folder: Path) -> bool:
    """Load every task that is named (not those of patterns and groups); write the files of those that are changed."""
    from kvexp.tasks.lm_eval import definition

    local = mine.data_dir is not None or mine.fewshot_split is not None
    if theirs.include_path is not None:
        if local:
            raise ConfigError("--data_dir and --fewshot_split cannot be combined with --include_path")
        return False
    for word in (word for words in theirs.tasks for word in words.split(",") if not set("*?[") & set(word)):
        names = definition.names_of(word)
        for name in names if local or names == [word] else ():
            where = {"data_dir": mine.data_dir, "fewshot_split": mine.fewshot_split}
            definition.load(name, shots=theirs.num_fewshot, **where)
            if local:
                shots = (
                    definition.config_of(name).get("num_fewshot") if theirs.num_fewshot is None else theirs.num_fewshot
                )
                definition.task_file(folder, name, shots=shots or 0, **where)
    return local
