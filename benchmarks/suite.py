"""`make bench`, `bench-real` and `bench-gpu`: the benchmarks in order, each a command that may take ten minutes.

    python -m benchmarks.suite cpu
    python -m benchmarks.suite real
    python -m benchmarks.suite real --all
    python -m benchmarks.suite gpu --only table1_1k llama2_32k

`real` alone is what fits into 15 minutes of two free cores; --all takes 50. What is already under benchmarks/results is
not measured again, so a suite that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.store import RESULTS, ROOT
from kvexp.util.files import cache_folder
from kvexp.util.output import watch_pipes

MINUTES = 10


@dataclass(frozen=True)
class Run:
    """One command: benchmarks.`module` with `arguments`; `tiny`: what to change to try it on a CPU in seconds.

    more: run on request alone, by --all or --only.
    """

    name: str
    module: str
    arguments: str
    tiny: str
    python: str = sys.executable
    more: bool = False

    def words(self, tiny: bool = False) -> list[str]:
        return [*self.arguments.split(), *(["--tiny", "--repeats", "1", *self.tiny.split()] if tiny else [])]


PEERS = ROOT / ".venv-peers" / "bin" / "python"
EVICTING = "h2o@0.2 keyformer@0.2 a2sf@0.2"
LONG = "--variants hf full h2o@0.2 keyformer@0.2 a2sf@0.2 streaming_llm@0.2"
PAPER = "--variants hf full h2o@0.9 keyformer@0.5 h2o@0.5"
FETCH = "--variants full h2o@0.2 sparq@0.2 infllm@0.2 pqcache@0.2"

CPU = (
    Run(
        "decode",
        "decode",
        f"--prompts 4096 --repeats 3 --variants hf hf_static full {EVICTING} streaming_llm@0.2 short@0.2",
        "--prompts 40 --new 4",
    ),
    Run(
        "decode_8k",
        "decode",
        f"--prompts 8192 --batches 1 8 --new 32 --repeats 3 --variants hf full {EVICTING} short@0.2",
        "--prompts 50 --batches 1 2 --new 4",
    ),
    Run("prefill", "prefill", f"--prompts 8192 --repeats 2 --variants hf {EVICTING}", "--prompts 40"),
    Run(
        "sweep",
        "sweep",
        "--basic --model testbed_rope --articles 24 --new 32 --repeats 1",
        "--articles 1 --new 3",
    ),
    Run("peers", "peers", "--prompts 4096 --repeats 1", "--prompts 70 --new 3", str(PEERS)),
)


def _table_1(length: int) -> Run:
    """Keyformer's Table 1 and Fig 9."""
    arguments = f"--shape mpt_7b --lengths {length}+{length} --beams 1 4 --repeats 3 --window 32 {PAPER}"
    return Run(f"table1_{length // 1024}k", "whole", arguments, "--lengths 20+20 --window 4 --beams 1 2")


def _batch(length: int) -> Run:
    """Table 1's lengths, batch to the limit."""
    arguments = f"--shape mpt_7b --lengths {length}+{length} --most 96 --repeats 2 --window 16 {PAPER}"
    tiny = "--lengths 12+12 --most 3 --window 4 --limit-gib 1"
    return Run(f"batch_{length // 1024}k", "throughput", arguments, tiny)


def _long(shape: str, length: int) -> Run:
    """A 7B layout after a long prompt."""
    arguments = f"--shape {shape} --lengths {length}+64 --repeats 3 {LONG}"
    return Run(f"{shape.partition('_')[0]}_{length // 1024}k", "whole", arguments, "--lengths 48+4")


def _fetch(length: int) -> Run:
    """PQCache's Fig 10 a, b (arXiv:2407.12820): time to token 2 and per token of methods that fetch."""
    arguments = f"--shape mistral_7b --lengths {length}+30 --repeats 3 {FETCH}"
    return Run(f"retrieval_{length // 1024}k", "whole", arguments, "--lengths 200+4")


def _first_token(length: int) -> Run:
    """What the Triton kernels cost a prompt."""
    arguments = f"--shape llama2_7b --prompts {length} --observe triton --repeats 3 --variants hf full {EVICTING}"
    return Run(f"prefill_{length // 1024}k", "prefill", arguments, "--prompts 40 --observe blocked")


def _captured(name: str, rows: str, variants: str) -> Run:
    """Decode steps as CUDA graphs, the time of capturing them included."""
    arguments = f"--shape llama2_7b {rows} --window 128 --repeats 2 --variants {variants}"
    return Run(name, "whole", arguments, "--lengths 48+4 --batches 1")


GPU = (
    Run(
        "decode_8k",
        "decode",
        f"--shape llama2_7b --prompts 8192 --batches 1 8 --repeats 3 --variants hf full {EVICTING} "
        "h2o@0.5 keyformer@0.5 a2sf@0.5 short@0.2 short@0.5",
        "--prompts 50 --batches 1 2 --new 4",
    ),
    *(_first_token(length) for length in (8192, 32768)),
    _captured("captured_8k", "--lengths 8192+128", "hf full full,graph=auto h2o@0.2 h2o@0.2,graph=auto"),
    _captured("captured_rows", "--lengths 2048+128 --batches 1 24", "hf full,graph=auto h2o@0.2,graph=auto"),
    *(_table_1(length) for length in (1024, 2048, 4096)),
    Run(
        "figure_1",
        "keyformer_figures",
        "--figures 1 --lengths 512 1024 2048 4096 8192 --beams 1 --repeats 2",
        "--lengths 8 16 --window 4",
    ),
    Run("figure_10", "keyformer_figures", "--figures 10 --beams 1 --repeats 3", "--lengths 8 16 --window 4"),
    *(_batch(length) for length in (1024, 2048, 4096)),
    *(_long(shape, length) for shape in ("llama2_7b", "mistral_7b") for length in (2048, 8192, 32768)),
    *(_fetch(length) for length in (2048, 8192, 32768)),
)

_REAL = "--shape smollm2_135m"
_REAL_VARIANTS = f"--variants hf hf_packed full {EVICTING}"
REAL = (
    *(
        Run(
            f"real_decode_{prompt // 1024}k",
            "decode",
            f"{_REAL} --prompts {prompt} --new 32 --repeats 3 {_REAL_VARIANTS}",
            "--prompts 40 --new 4",
            more=prompt > 4096,
        )
        for prompt in (1024, 4096, 6144)
    ),
    *(
        Run(
            f"real_prefill_{prompt // 1024}k",
            "prefill",
            f"{_REAL} --prompts {prompt} --repeats {repeats} {_REAL_VARIANTS}",
            "--prompts 40",
            more=prompt > 4096,
        )
        for prompt, repeats in ((1024, 3), (4096, 2), (7168, 1))
    ),
    Run("real_sweep", "sweep", "--articles 6 --new 96 --repeats 1", "--articles 1 --new 3"),
    Run("real_basic", "sweep", "--basic --articles 2 --new 32 --repeats 1", "--articles 1 --new 3", more=True),
    Run(
        "real_heads",
        "decode",
        f"{_REAL} --prompts 4096 --batches 1 16 --new 32 --repeats 3 --variants hf full h2o@0.5 "
        "h2o@0.5,heads=adaptive h2o@0.5,heads=global h2o@0.5,heads=union",
        "--prompts 40 --batches 1 2 --new 4",
        more=True,
    ),
    Run(
        "real_bits",
        "decode",
        f"{_REAL} --prompts 1024 4096 --new 24 --repeats 3 --variants hf full full,bits=8 full,bits=4 full,bits=2 "
        "h2o@0.5 h2o@0.5,bits=4",
        "--prompts 40 --new 4",
        more=True,
    ),
    Run("real_growth", "growth", f"{_REAL} --repeats 2", "", more=True),
    Run(
        "real_peers",
        "peers",
        f"{_REAL} --prompts 1024 4096 --new 16 --repeats 1",
        "--prompts 70 --new 3",
        str(PEERS),
        more=True,
    ),
)

SUITES = {"cpu": CPU, "gpu": GPU, "real": REAL}


def run(job: Run, options: argparse.Namespace) -> bool:
    """Run one command to its limit; False if it failed, was too slow, or cannot run here."""
    if not Path(job.python).exists():
        print(f"\n{job.name}: left out, {job.python} does not exist; run: make peers", flush=True)
        return True
    more = ["--out", options.out, *(["--again"] if options.again else [])]
    line = [job.python, "-m", f"benchmarks.{job.module}", *job.words(options.tiny), *more]
    print(f"\n== {job.name}: python -m benchmarks.{job.module} {' '.join(job.words(options.tiny))}", flush=True)
    start = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if job.python == str(PEERS) and "smollm2" in job.arguments:
        environment["KVEXP_CACHE"] = str(cache_folder())
    try:
        code = subprocess.run(line, cwd=ROOT, env=environment, timeout=options.minutes * 60).returncode
    except subprocess.TimeoutExpired:
        print(f"{job.name}: stopped after {options.minutes:g} minutes; the same command goes on from there", flush=True)
        return False
    print(f"{job.name}: {time.perf_counter() - start:.0f} s{'' if code == 0 else f', ended with {code}'}", flush=True)
    return code == 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suite", description=__doc__)
    parser.add_argument("suite", choices=list(SUITES))
    parser.add_argument("--only", nargs="+", default=None)
    parser.add_argument("--all", action="store_true", help="also what is run on request alone")
    parser.add_argument("--list", action="store_true", help="print the commands")
    parser.add_argument("--again", action="store_true", help="measure also what is there")
    parser.add_argument("--tiny", action="store_true", help="tiny layouts: shows that everything runs")
    parser.add_argument("--out", default=str(RESULTS))
    parser.add_argument("--minutes", type=float, default=MINUTES, help="per command")
    options = parser.parse_args(arguments)
    runs = SUITES[options.suite]
    unknown = set(options.only or ()) - {job.name for job in runs}
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))} is not of {', '.join(job.name for job in runs)}")
    by_itself = [job.name for job in runs if options.all or not job.more]
    chosen = [job for job in runs if job.name in (options.only or by_itself)]
    if options.list:
        for job in chosen:
            print(f"{job.name:16s} python -m benchmarks.{job.module} {' '.join(job.words(options.tiny))}")
        return 0
    failed = [job.name for job in chosen if not run(job, options)]
    print(f"\n{len(chosen) - len(failed)} of {len(chosen)} done" + (f"; not: {', '.join(failed)}" if failed else ""))
    print(f"all tables again: python -m benchmarks.report {options.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
