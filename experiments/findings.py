"""What we conclude of every exhibit: findings.csv, each judgement with its sentence and the reason for it.

Numbers are read from measured.json and measured_real.json alone, reasons from findings.yaml. FINDINGS.md shows some of
them: python -m experiments.pages findings

python -m experiments.findings            write it
python -m experiments.findings --check    exit 1 if the file is another
"""

from __future__ import annotations

import csv
import functools
import io
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import OmegaConf

from experiments.lib.exhibits import HERE, load, names
from experiments.lib.record import (
    NONE,
    NOT_RUN,
    SECOND,
    WAITING,
    examples_of,
    is_speed,
    real_status,
    recorded,
    status,
    write_or_check,
)
from kvexp.util.errors import ConfigError
from kvexp.util.output import watch_pipes

JUDGEMENTS, WORDS = HERE / "findings.csv", HERE / "findings.yaml"
KEYS = ("short", "number", "leads", "why", "limits", "real")


@functools.cache
def words(name: str) -> dict[str, Any]:
    """What findings.yaml says of one exhibit: why, and the others of KEYS where there are any."""
    written: Any = OmegaConf.to_container(OmegaConf.load(WORDS))
    found = written.get(name)
    if not isinstance(found, dict) or not {"why"} <= set(found) <= set(KEYS):
        raise ConfigError(f"{WORDS}: {name} needs `why`, and may have {', '.join(KEYS)}; got {found!r}")
    return found


def judgements() -> str:
    """findings.csv: a line for each exhibit and judgement, with the recorded sentence and the reason for it."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("exhibit", "title", "claim", "scale", "judged_by", "verdict", "n", "sentence", "reason", "limits"))
    for name in names():
        about = (name, load(name).title, load(name).claim)
        writer.writerows((*about, *line) for line in _judgements(name))
    return out.getvalue()


def _judgements(name: str) -> Iterator[tuple[str, ...]]:
    said, small = words(name), recorded("testbed").get(name)
    for model, scale, why in (("SmolLM2-135M", "real", said.get("real", "")), (SECOND, SECOND, "")):
        entry = recorded(scale).get(name)
        metric, divergence = real_status(name, entry)
        if entry is not None:
            n = examples_of(entry)
            yield model, "metric", metric, n, entry["words"], why, ""
            if "divergence" in entry:
                yield model, "divergence", divergence, n, entry["divergence"]["words"], why, ""
        elif scale == SECOND:
            continue  # few exhibits are made with it
        elif metric == NOT_RUN:
            yield model, "metric", NOT_RUN, "", f"make reproduce-{name} SCALE=real", "", ""
        elif load(name).testbed_only:
            yield model, "metric", NONE, "", load(name).testbed_only, "", ""
    sentence = f"make reproduce-{name} SCALE=testbed" if small is None else small["words"]
    place = "GPU" if is_speed(name) else "testbed"
    yield place, "metric", status(small), "", sentence, said["why"], said.get("limits", "")


def outcomes(name: str) -> str:
    """What is recorded of an exhibit at each scale, in one line: what a notebook says above its cell."""
    testbed = status(recorded("testbed").get(name))
    metric, divergence = real_status(name, recorded("real").get(name))
    if metric == NONE:
        place = "a GPU" if is_speed(name) else "the testbed"
        return testbed if testbed == WAITING else f"{testbed} on {place}"
    also = "" if divergence == NONE else f" (by divergence {divergence})"
    return f"{metric} on SmolLM2-135M{also}, {testbed} on the testbed"


def main(arguments: Sequence[str] | None = None) -> int:
    return write_or_check({JUDGEMENTS: judgements}, "python -m experiments.findings", arguments, __doc__)


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
