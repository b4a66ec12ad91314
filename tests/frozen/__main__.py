"""`make frozen`: run the command lines of commands.py and compare what they write with the recording, digest by digest.

    python tests/frozen record FILE     write a recording of this tree
    python tests/frozen compare [NAME]  hold this tree against frozen.json; exit code 1 and the names where it differs;
                                        NAME...: only of commands.py's entries whose names begin so

Floating-point sums depend on the processor and its libraries: on a machine unlike the recording's, the commit that the
recording was made at is recorded first, in a worktree of its own.
"""

from __future__ import annotations

import csv
import hashlib
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE), str(HERE.parent)]

import adapter  # noqa: E402
import commands  # noqa: E402
from faults.stage import run_as_program  # noqa: E402

FILE = HERE / "frozen.json"
TOGETHER = 2  # processes at once, one thread each
ENV = {
    **{"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "COLUMNS": "200"},
    **{"TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"},
}
PARTS = {
    **{"exits": commands.RUNS, "runs": commands.RUNS},
    **{"tables": commands.TABLES, "identities": commands.IDENTITIES},
}
os.environ.update(ENV)  # before anything imports torch: the last digits of KL depend on its threads
LOADED = ("torch", "pandas", "datasets", "hydra", "rich.table", "safetensors.torch", "lm_eval", "transformers", "scipy")
NOT_A_NUMBER_OF_THE_RUN = ("seconds", "batch_size", "revision", "numerics", "threads", "load")
TIMED_COLUMNS = (
    "ttft_s",
    "tt2t_s",
    "tpot_s",
    "tokens_per_s",
    "timed",
    "busy",
    "batch_size",
    "smallest_batch",
    "baseline_check",  # of recordings before 0.3
)


def main(words: list[str]) -> int:
    if words[:1] == ["record"] and len(words) == 2:
        Path(words[1]).write_text(json.dumps(record(), indent=0, sort_keys=True) + "\n")
        return 0
    if words[:1] == ["compare"]:
        for table in (commands.RUNS, commands.TABLES, commands.IDENTITIES):
            for name in [name for name in table if words[1:] and not name.startswith(tuple(words[1:]))]:
                del table[name]
        return compare()
    print(__doc__)
    return 2


def compare() -> int:
    """Say what differs from the recording."""
    known = json.loads(FILE.read_text())
    if known["machine"] != machine():
        print(
            f"recorded on {known['machine']}, this is {machine()}: recording commit {known['commit'][:10]} here first"
        )
        known = record_of(known["commit"])
    for part, table in PARTS.items():
        known[part] = {name: value for name, value in known[part].items() if name in table}
    wrong = differences(known, record())
    for line in wrong:
        print(line)
    runs = sum(len(each) for each in known["runs"].values())
    said = f"{len(wrong)} differences" if wrong else "unchanged"
    print(f"frozen: {said} ({runs} runs, {len(known['identities'])} command lines, {len(known['tables'])} tables)")
    return 1 if wrong else 0


def differences(known: dict, now: dict) -> list[str]:
    """A line for every digest that is not as it was, or is there once."""
    found = []
    for part in ("exits", "identities", "tables"):
        for name in sorted(known[part].keys() | now[part].keys()):
            if known[part].get(name) != now[part].get(name):
                found.append(f"{part}: {name}: {known[part].get(name)} -> {now[part].get(name)}")
    for name in sorted(known["runs"].keys() | now["runs"].keys()):
        before, after = known["runs"].get(name, {}), now["runs"].get(name, {})
        for run in sorted(before.keys() | after.keys()):
            if before.get(run) != after.get(run):
                fields = before.get(run, {}).keys() | after.get(run, {}).keys()
                moved = [key for key in sorted(fields) if before.get(run, {}).get(key) != after.get(run, {}).get(key)]
                found.append(f"runs: {name} {run}: {', '.join(moved)}")
    return found


def record_of(commit: str) -> dict:
    """What the tree of a commit writes on this machine."""
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=ROOT, check=True)
        try:
            there = tree / HERE.relative_to(ROOT)
            subprocess.run(
                [sys.executable, there, "record", Path(place) / "made.json"],
                cwd=tree,
                env=os.environ | {"PYTHONPATH": str(tree)},
                check=True,
            )
            return json.loads((Path(place) / "made.json").read_text())
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def record() -> dict:
    """Run everything; digests of what was written."""
    os.chdir(ROOT)
    cache = os.environ.get("KVEXP_FROZEN_OUT")
    place = Path(cache or tempfile.mkdtemp(prefix="frozen-"))
    place.mkdir(parents=True, exist_ok=True)
    own_cache(place / "cache")
    for name in LOADED:
        importlib.import_module(name)
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        made: dict = {"machine": machine(), "commit": commit}
        all_done(place, {name: ("command", words) for name, words in commands.BEFORE.items()})
        made["exits"] = all_done(
            place, {name: ("run_py", [*words, f"outputs_dir={place / name}"]) for name, words in commands.RUNS.items()}
        )
        made["runs"] = {name: runs_of(place / name) for name in commands.RUNS}
        tables = {
            name: ("command", [word.format(out=place) for word in words] + ["--csv", str(place / f"{name}.csv")])
            for name, words in commands.TABLES.items()
        }
        all_done(place, tables)
        made["tables"] = {name: table_digest(place / f"{name}.csv") for name in commands.TABLES}
        all_done(place, {name: ("compose", words) for name, words in commands.IDENTITIES.items()})
        made["identities"] = {name: lines_digest(place / f"{name}.ids") for name in commands.IDENTITIES}
        return made
    finally:
        if cache is None:
            shutil.rmtree(place)


def own_cache(folder: Path) -> None:
    """A cache folder of this recording, with the models of the user's: what is calibrated here replaces nothing."""
    users = Path(os.environ.get("KVEXP_CACHE") or importlib.import_module("platformdirs").user_cache_dir("kvexp"))
    folder.mkdir(exist_ok=True)
    if (users / "models").is_dir() and not (folder / "models").exists():
        (folder / "models").symlink_to(users / "models")
    os.environ["KVEXP_CACHE"] = str(folder)


def machine() -> str:
    """What a floating-point sum depends on: the processor, its instructions, torch."""
    info = Path("/proc/cpuinfo")
    said = dict(
        (part.strip() for part in line.split(":", 1)) for line in info.read_text().splitlines() if ":" in line
    ) if info.exists() else {}  # fmt: skip
    model = said.get("model name") or platform.processor() or platform.machine()
    vectors = " ".join(sorted(flag for flag in said.get("flags", "").split() if flag.startswith(("avx", "amx", "fma"))))
    kind = "/".join(said.get(key, "?") for key in ("cpu family", "model", "stepping"))
    torch = importlib.import_module("torch")
    return f"{model} {kind} {digest(vectors)}, torch {torch.__version__}, 1 thread"


def all_done(place: Path, jobs: dict[str, tuple[str, list[str]]]) -> dict[str, int]:
    """Exit codes of command lines, each in a process forked off this one, TOGETHER at once."""
    waiting, running, exits = list(jobs.items()), {}, {}
    while waiting or running:
        while waiting and len(running) < TOGETHER:
            name, (program, words) = waiting.pop(0)
            pid = os.fork()
            if not pid:
                become(place, name, program, words)
            running[pid] = name
        pid, status = os.wait()
        exits[running.pop(pid)] = os.waitstatus_to_exitcode(status)
    return exits


def become(place: Path, name: str, program: str, words: list[str]) -> None:
    """This process is the command line now."""

    def run():
        if program == "compose":
            out = (place / f"{name}.ids").open("w")
            adapter.collect_identities(lambda line: print(line, file=out, flush=True))
        (adapter.command if program == "command" else adapter.run_py)()

    log = place / f"{name}.log"
    log.unlink(missing_ok=True)
    run_as_program(log, ["run.py" if program != "command" else "kvexp", *words], run)


def runs_of(folder: Path) -> dict[str, dict[str, str]]:
    """Run hash -> digests of its rows, tokens, kept sets and divergence."""
    found: dict[str, dict[str, str]] = {}
    for run in sorted(path.parent for path in folder.glob("*/config.json")):
        rows = lines_of(run.glob("examples*.jsonl"))
        kl = lines_of(run.glob("divergence*.jsonl"))
        parts = {
            "rows": [without(row) for row in rows],
            "tokens": [row.get("output_tokens") for row in rows],
            "kept": [(row.get("receipt") or {}).get("kept_digest") for row in rows],
            "kl": [without(line) for line in kl],
        }
        more = {
            path.name: [without(line) for line in lines_of([path])] for path in sorted(run.glob("evictions*.jsonl"))
        }
        found[run.name] = {name: digest(value) for name, value in {**parts, **more}.items()}
    return found


def lines_of(paths) -> list[dict]:
    lines = [json.loads(line) for path in sorted(paths) for line in path.read_text().splitlines()]
    return sorted(lines, key=lambda line: json.dumps([line.get("index"), line.get("text"), line.get("example")]))


def without(node):
    """A row without what depends on time and company."""
    if isinstance(node, dict):
        return {key: without(value) for key, value in node.items() if key not in NOT_A_NUMBER_OF_THE_RUN}
    return [without(value) for value in node] if isinstance(node, list) else node


def table_digest(path: Path) -> str | None:
    """Digest of the columns of a CSV that are no times."""
    if not path.exists():
        return None
    rows = [
        {name: value for name, value in row.items() if name not in TIMED_COLUMNS}
        for row in csv.DictReader(path.open(newline=""))
    ]
    return digest(rows)


def lines_digest(path: Path) -> str:
    """How many jobs a command line makes, and a digest of their identities."""
    lines = path.read_text().splitlines() if path.exists() else []
    return f"{len(lines)} {digest(lines)}"


def digest(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
