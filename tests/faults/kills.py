"""Sweeps that are killed at random moments and resumed, and what they leave compared with an undisturbed one's."""

import random
import re
import signal
import time
from pathlib import Path

# Prompts of unequal length in batches, draws for every token, noise in a method: whatever could depend on a restart.
SWEEP = (
    *("-m", "method=h2o,keyformer", "kv_ratio=0.3", "model=testbed_rope", "task=testbed_summary", "limit=5"),
    *("batch_size=2", "generation=sampling", "task.max_new_tokens=8"),
)
# All that may differ between a run that was killed and one that was not: how long things took.
TIMES = re.compile(rb'"seconds":\{[^}]*\}')
NOT_COMPARED = {".sweeps", "command.json"}  # records of the command line, which name the folder


def content(folder, ordered=True):
    """File -> its bytes, but for times; if not ordered, also for the order of rows: several processes wrote them."""
    files = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    compared = {name: path for name, path in files.items() if NOT_COMPARED.isdisjoint(name.parts)}
    found = {str(name): TIMES.sub(b'"seconds":{}', path.read_bytes()) for name, path in compared.items()}
    return found if ordered else {name: b"\n".join(sorted(text.splitlines())) for name, text in found.items()}


class Killer:
    """start(words, out): a `stage.Child`; folder: for everything that is written; ordered: see `content`."""

    def __init__(self, start, launcher, folder, seed, ordered=True):
        self.start, self.folder, self.rng, self.ordered = start, Path(folder), random.Random(seed), ordered
        self.words = (*SWEEP, f"hydra/launcher={launcher}")
        self.kills = self.sweeps = 0

    def truth(self):
        """(what an undisturbed sweep leaves, how long it takes)."""
        begun = time.monotonic()
        self.finish("undisturbed")
        return content(self.folder / "undisturbed", self.ordered), time.monotonic() - begun

    def child(self, name):
        return self.start([*self.words, f"outputs_dir={self.folder / name}"], self.folder / f"{name}.log")

    def finish(self, name):
        child = self.child(name)
        code = child.wait()
        assert code == 0, f"exit code {code}: {child.said}"

    def run(self, wanted):
        """That many kills, over as many sweeps as it takes; every sweep is brought to its end and compared."""
        truth, duration = self.truth()
        assert sum(name.endswith("done.json") for name in truth) == 3, sorted(truth)
        while self.kills < wanted:
            name = f"killed{self.sweeps}"
            while self.kills < wanted and self.killed(name, self.rng.uniform(0, duration)):
                pass
            self.finish(name)
            found = content(self.folder / name, self.ordered)
            differing = sorted(file for file in truth.keys() | found.keys() if truth.get(file) != found.get(file))
            assert not differing, f"{name}: {differing}"
            self.sweeps += 1

    def killed(self, name, after):
        """Whether the kill came before the sweep's end."""
        child = self.child(name)
        end = time.monotonic() + after
        while time.monotonic() < end and child.poll() is None:
            time.sleep(0.005)
        child.send(signal.SIGKILL)
        code = child.wait()
        assert code in (0, -signal.SIGKILL), f"exit code {code}: {child.said}"
        self.kills += code != 0
        return code != 0
