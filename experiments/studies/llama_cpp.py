"""What llama.cpp's cache formats and evictions cost, measured in llama.cpp itself (engine=llama_cpp).

    python -m experiments.studies.llama_cpp record OUTPUTS          # goes on where it was; two hours of a core
    python -m experiments.studies.llama_cpp table OUTPUTS --csv docs/llama_cpp.csv
    python -m experiments.studies.llama_cpp page docs/llama_cpp.csv --page docs/llama_cpp.md

A line of the CSV is a task and a setting: KL from the engine's own full cache in f32 along that cache's answer, with
its interval, and from transformers' full cache (kl_transformers), of which engine_kl is the engine's own. The page's
table has a line for each setting.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from experiments.lib.tables import markdown, with_interval
from experiments.studies import carried_out, composed_runs, write_tables
from kvexp.results.divergence import divergence_table
from kvexp.results.read import read_runs
from kvexp.run.batches import measure_rest, prefill_groups, run_group
from kvexp.run.session import Session
from kvexp.run.settings import Settings
from kvexp.util.output import say, watch_pipes

TASKS = {
    "news": ["task=news", "task.max_new_tokens=16", "limit=20", "divergence=only"],
    "news_qa": ["task=news_qa", "task.question=in_prompt", "limit=20", "divergence=true"],
    "ruler": ["task=ruler", "task.subset=niah_single_2", "task.lengths=[1024]", "limit=20", "divergence=true"],
}
FORMATS = ("f16", "q8_0", "q4_0")
SLIDING = "method=streaming_llm kv_ratio=0.5"
# Words of the command line behind engine=llama_cpp, in rounds: the first ones are recorded of all tasks first.
ROUNDS = (
    [
        *(f"engine.cache_k={name}" for name in FORMATS),
        *(f"engine.cache_k={name} {SLIDING} cache.positions=original" for name in FORMATS),
        *(f"engine.cache_k={name} {SLIDING} cache.positions=renumbered" for name in FORMATS),
        *(f"engine.cache_k={name} method=streaming_llm kv_ratio=1.0 engine.shift=half" for name in ("f16", "q4_0")),
        "engine.cache_k=f16 method=random method.per=model method.protect_recent=2 kv_ratio=0.5",
    ],
    [
        "engine.cache_k=q4_0 engine.rotate=false",
        "engine.cache_k=q8_0 engine.cache_v=q4_0",
        "engine.cache_k=q4_0 engine.cache_v=q8_0",
        "engine.cache_k=q8_0 engine.rotate=false",
    ],
    [f"engine.cache_k={name}" for name in ("q5_0", "q4_1", "iq4_nl", "q5_1")],
)
COLUMNS = (
    *("numerics", "task", "method", "kv_ratio", "setting", "n", "kl", "kl_low", "kl_high", "top1"),
    *("kl_transformers", "engine_kl", "hash"),
)
BEGIN, END = "<!-- llama.cpp: python -m experiments.studies.llama_cpp page -->", "<!-- end of llama.cpp -->"
ROUNDS_OF = {"news": 3, "news_qa": 1, "ruler": 1}


def runs(outputs: Path, task: str, number: int, more: Sequence[str]) -> list[Settings]:
    """The runs of one round of a task."""
    words, session = [*TASKS[task], "batch_size=1", "engine=llama_cpp", f"outputs_dir={outputs}", *more], Session()
    lines = [setting if "method=" in setting else f"method=full {setting}" for setting in ROUNDS[number]]
    return [run for setting in lines for run in composed_runs([*words, *setting.split()], session)[1]]


def _record(args: argparse.Namespace) -> int:
    session = Session()
    for number in range(len(ROUNDS)):
        for task in args.task or TASKS:
            if number < ROUNDS_OF[task]:
                wanted = runs(args.outputs, task, number, args.words)
                for group in prefill_groups(wanted):
                    run_group(group, session)
                for run in wanted:
                    measure_rest(run, session)
    return 0


def _table(args: argparse.Namespace) -> int:
    table = divergence_table(read_runs(args.outputs).ran).sort_values(["task", "setting"])[list(COLUMNS)]
    say(table.to_string(index=False, na_rep=""))
    if args.csv is not None:
        table.to_csv(args.csv, index=False, float_format="%.6g")
    return 0


def _page(args: argparse.Namespace) -> int:
    write_tables(text_of(pd.read_csv(args.outputs)), args.page, BEGIN, END)
    return 0


def text_of(rows: pd.DataFrame) -> str:
    """Markdown: KL with its 95 % interval, a line for each setting and a column for each task."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows.to_dict("records"):
        words = re.sub(r"(engine=|task\.)\S+", "", row["setting"]).split()
        if row["method"] != "full_quantised":
            words = [f"method={row['method']}", f"kv_ratio={row['kv_ratio']:g}", *words]
        number = with_interval(row["kl"], row["kl_low"], row["kl_high"])
        cells.setdefault(" ".join(words), {})[row["task"].partition("/")[0]] = number
    order = sorted(cells, key=lambda words: ("method=" in words, words))
    return markdown(
        ("setting", *TASKS), *((f"`{words}`", *(cells[words].get(task, "") for task in TASKS)) for words in order)
    )


def main(words: Sequence[str] | None = None) -> int:
    """Record or show the study; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments.studies.llama_cpp", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, command in {"record": _record, "table": _table, "page": _page}.items():
        sub = commands.add_parser(name)
        sub.add_argument("outputs", type=Path, nargs="?", default=Path("outputs/llama_cpp"))
        sub.add_argument("--task", action="append", choices=list(TASKS))
        sub.add_argument("--words", nargs="*", default=[], help="further words of the command line, such as threads=2")
        if name == "table":
            sub.add_argument("--csv", type=Path, help="also write the table into this file")
        if name == "page":
            sub.add_argument("--page", type=Path, help="write the table into this page")
        sub.set_defaults(command=command)
    return carried_out(parser, words)


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
