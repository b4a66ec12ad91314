"""`make mutations`: break one mechanism of kvexp at a time in a copy; tests of the default suite must notice each.

    python tests/mutations.py [NAME...]     NAME: how the names of mutations begin; all without one

Exit code 1 where a mutation survives, or where its line is no longer in the source: then this table is to follow.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAILED = 1  # pytest's exit code where tests ran and some failed


@dataclass(frozen=True)
class Mutation:
    """A line of the source, what it becomes, and the test files (space between) of which one must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str


# Name, file of kvexp: test files, - line, + what it becomes.
TABLE = r"""
sinks are not protected
core/ranking.py: methods/test_kept_sets.py
- (positions >= 0) & (recent | (positions < (sinks if isinstance(sinks, int) else sinks[..., None])))
+ (positions >= 0) & recent

the recent window is one token longer
core/ranking.py: methods/test_kept_sets.py
- positions > (ctx.newest[:, None] - allowed.recent_by_head)[..., None]
+ positions >= (ctx.newest[:, None] - allowed.recent_by_head)[..., None]

among equals the newer goes
core/slot_order.py: core/test_layer.py methods/test_kept_sets.py
- (ordered.to(torch.int64) << 32) | positions
+ (ordered.to(torch.int64) << 32) | (INT32_MAX - positions)

a query of a tile sees the token behind its own
core/attention.py: core/test_observe.py
- torch.ones(q, q, dtype=torch.bool).triu(1)
+ torch.ones(q, q, dtype=torch.bool).triu(2)

probabilities with noise are not divided by their sum
core/observe.py: core/test_observe.py
- weights = weights / x.sum(-1)
+ pass

noise forgets the layer
core/noise.py: core/test_observe.py methods/test_kept_sets.py
- lowbias32(lowbias32(low) + layer * 97 + 1)
+ lowbias32(lowbias32(low) + 1)

noise forgets the query's position
core/noise.py: core/test_observe.py methods/test_kept_sets.py
- query_positions.to(torch.int32)[:, None, :] * _GOLDEN) & (POOL_SIZE - 1)
+ query_positions.to(torch.int32)[:, None, :] * 0) & (POOL_SIZE - 1)

survivors are not renumbered
core/eviction.py: core/test_layer.py methods/test_reference.py test_golden.py
- if config.renumbered and self.has_evicted:
+ if config.renumbered and self.has_evicted and False:

a query sees the next token
core/attention.py: core/test_observe.py core/test_layer.py
- ok = (key >= 0) & (key <= query)
+ ok = (key >= 0) & (key <= query + 1)

a cache that grows writes the next token over the last
core/decode_stack.py: core/test_step.py
- self.free_slots[: rows.start] += 1
+ self.free_slots[: rows.start] += 0

a step does not read the newest columns
core/decode_stack.py: core/test_step.py
- used = coming + max(
+ used = coming - 8 + max(

a layer goes on behind the chunk that the layer before has taken
core/sequence.py: generate/test_divergence.py
- self._take_chunk_place(0)
+ self._take_chunk_place(1)

steps between evictions take one slot again and again
core/decode.py: core/test_step.py
- free_slots.copy_(free_slots.roll(-1, -1))
+ pass

beams do not share a score
core/observe.py: core/test_observe.py
- "per_sample": sequence.num_beams
+ "per_sample": 1

a budget rounds up
core/budget.py: core/test_layer.py methods/test_kept_sets.py
- return math.floor(ratio * count + 1e-9)
+ return math.ceil(ratio * count - 1e-9)

58 percent of 100 are 57
core/budget.py: core/test_layer_budgets.py
- return math.floor(ratio * count + 1e-9)
+ return math.floor(ratio * count)

a marked span is not spared
core/ranking.py: core/test_spans.py
- return priority, protected | ((number >= 0) & held)
+ return priority, protected

the newest tokens are quantised too
core/quantized.py: core/test_quantised.py
- self._quantize(held, positions, (newest - self.codec.residual)[:, None, None])
+ self._quantize(held, positions, newest[:, None, None])

the cadence evicts one step late
core/eviction.py: core/test_layer.py methods/test_reference.py
- (sequence.decode_steps + width) // every > sequence.decode_steps // every
+ (sequence.decode_steps + width - 1) // every > (sequence.decode_steps - 1) // every

a slot must exceed the threshold
core/ranking.py: core/test_head_budgets.py
- self.priority >= self.threshold
+ self.priority > self.threshold

a threshold takes sinks
core/ranking.py: core/test_head_budgets.py
- ((self.priority >= self.threshold) | self.protected)
+ (self.priority >= self.threshold)

PyramidKV's layers lose a slot
core/budget_shares.py: core/test_layer_budgets.py
- middle = [mean] * (layers % 2)
+ middle = [mean - 1] * (layers % 2)

AdaKV forgets its floor
core/budget_shares.py: core/test_head_budgets.py
- (rank < torch.maximum(sure, least))
+ (rank < sure)

KL counts the token before the eviction
results/divergence.py: results/test_divergence_table.py
- skip = int(line["first_by_prefill"])
+ skip = 0

KL is taken the other way round
generate/kl.py: generate/test_divergence.py
- compare(full, logits[self.size :], token)
+ compare(logits[self.size :], full, token)

rows of other prompts are paired
results/read.py: results/test_results.py run/test_record.py
- if first.run.numerics == other.run.numerics:  # else they are not paired
+ if False:

verdicts are not corrected for their number
results/stats.py: results/test_results.py results/test_statistics.py
- floor, _ = percent_interval(comparison, index, level)
+ floor, _ = percent_interval(comparison, index, LEVEL)

an interval at the mark fails
results/stats.py: results/test_results.py results/test_statistics.py
- if low >= mark:
+ if low > mark:

a command starts over
run/batches.py: run/test_runner.py run/test_command.py
- answered = {row["example"] for row in rows if not (settings.retry and row.get("failed"))}
+ answered = set[str]()

another code of a method is the same run
run/user_code.py: run/test_user_methods.py
- hashlib.sha256(plain.encode(errors="backslashreplace"))
+ hashlib.sha256(plain[:20].encode(errors="backslashreplace"))

each fetched token is a hit
retrieval/offload.py: retrieval/test_offload.py
- row.hits += hit
+ row.hits += pairs
"""


def mutations() -> list[Mutation]:
    """Read `TABLE`."""
    found = []
    for entry in TABLE.strip().split("\n\n"):
        name, where, old, new = entry.splitlines()
        file, _, tests = where.partition(": ")
        found.append(Mutation(name, file, old.removeprefix("- "), new.removeprefix("+ "), tests))
    return found


MUTATIONS = mutations()


def main(words: list[str]) -> int:
    """Try the mutations whose names begin with one of the words, or all; a line for each."""
    chosen = [each for each in MUTATIONS if not words or each.name.startswith(tuple(words))]
    if not chosen:
        print(f"no mutation begins with {' or '.join(words)}: see MUTATIONS in {__file__}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="mutations-") as place:
        tree = copied(Path(place) / "kvexp")
        survived = [each.name for each in chosen if not caught(tree, each)]
    print(f"{len(chosen) - len(survived)} of {len(chosen)} mutations are caught")
    return 1 if survived else 0


def copied(tree: Path) -> Path:
    """A copy of the files that git knows or would take, with this environment's Python."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in listed.stdout.splitlines():
        source, target = ROOT / name, tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink() or source.is_file():
            shutil.copy2(source, target, follow_symlinks=False)
    return tree


def caught(tree: Path, mutation: Mutation) -> bool:
    """Whether a test fails of the broken copy; says so."""
    file = tree / "kvexp" / mutation.file
    text = file.read_text("utf-8")
    if text.count(mutation.old) != 1:
        print(f"GONE      {mutation.name}: {mutation.file} has {text.count(mutation.old)} times {mutation.old!r}")
        return False
    file.write_text(text.replace(mutation.old, mutation.new), "utf-8")
    try:
        files = [f"tests/{name}" for name in mutation.tests.split() if (tree / "tests" / name).exists()]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "--timeout=300"]
        chosen = ["-m", "not slow and not real and not gpu", *files]
        done = subprocess.run(
            [*command, *chosen],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
        )
    finally:
        file.write_text(text, "utf-8")
    failed = [line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    good = bool(files) and done.returncode == FAILED
    print(
        f"{'caught' if good else 'SURVIVED':<9} {mutation.name}: {failed[0] if failed else mutation.tests}", flush=True
    )
    return good


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
