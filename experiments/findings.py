"""What we conclude: FINDINGS.md, one table of all exhibits, and findings.csv, every judgement with its sentence.

Numbers come from measured.json and measured_real.json alone, short claims and reasons from findings.yaml. What stands
above the table is written by hand and stays.

python -m experiments.findings            write both
python -m experiments.findings --check    exit 1 if what stands there is something else
"""

from __future__ import annotations

import csv
import functools
import io
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import OmegaConf

from experiments.lib.exhibits import HERE, load, names
from experiments.lib.record import (
    NONE,
    NOT_RUN,
    SECOND,
    VERDICT,
    WAITING,
    examples_of,
    is_speed,
    real_status,
    recorded,
    status,
    write_or_check,
)
from experiments.lib.tables import markdown
from kvexp.util.errors import ConfigError
from kvexp.util.output import watch_pipes

FINDINGS, JUDGEMENTS = HERE / "FINDINGS.md", HERE / "findings.csv"
WORDS = HERE / "findings.yaml"
KEYS = ("short", "number", "why", "limits", "real")
CONTRADICTED = "contradicted"  # what the page calls a claim that does not hold
INTERVAL = r"[+-]?\d+(?:\.\d+)?(?: \([^()]*(?: … |, )[^()]*\))?"
TABLE = """\
## Every exhibit

Verdicts by the paper's metric and by divergence, the numbers behind them, examples, and the testbed's verdict (models
of under a million parameters). Bare numbers and *nearer by* are KL in nats per token (negative: farther); intervals are
95 %, and not corrected. *From 0.008, 1 of 20 is 57 %*: one example is more than half of the mean, and an upper end
would say little.
[findings.csv](findings.csv) has all numbers, claims and reasons. `make reproduce-NAME` and the
[notebooks](../notebooks/) draw each figure.

"""
SPEED = (
    "On an H200, random weights, uncaptured steps (Keyformer's Fig. 1: one beam, not four; "
    "PQCache's Fig. 7: measured once):"
)
AGAIN = f"The same on `{SECOND}`, a base model of which three layers evict ([two models](../docs/two_models.md)):"


@functools.cache
def words(name: str) -> dict[str, str]:
    """What findings.yaml says of one exhibit: short and why, and the others of KEYS where there are any."""
    written: Any = OmegaConf.to_container(OmegaConf.load(WORDS))
    found = written.get(name)
    if not isinstance(found, dict) or not {"short", "why"} <= set(found) <= set(KEYS):
        raise ConfigError(f"{WORDS}: {name} needs `short` and `why`, and may have {', '.join(KEYS)}; got {found!r}")
    return {key: str(text).strip() for key, text in found.items()}


def text() -> str:
    """The page."""
    real, testbed = recorded("real"), recorded("testbed")
    rows = [_row(name, real, testbed) for name in names() if not is_speed(name)]
    head = ("exhibit", "the paper", "metric", "divergence", "found", "n", "testbed")
    counts = Counter(row[3] for row in rows)
    verdicts = ", ".join(f"{verdict} {counts[verdict]}" for verdict in ("holds", CONTRADICTED, "undecided"))
    times = "; ".join(f"{_short_title(name)} {_said(testbed.get(name))}" for name in names() if is_speed(name))
    end = f"By divergence: {verdicts}. {SPEED} {times}."
    other = recorded(SECOND)
    again = [_row(name, other, testbed)[:-1] for name in names() if name in other]
    more = f"\n\n{AGAIN}\n\n{markdown(head[:-1], *again)}" if again else ""
    return f"{summary()}{TABLE}{markdown(head, *rows)}\n\n{end}{more}\n"


def summary() -> str:
    """The page's head, above the table."""
    return FINDINGS.read_text("utf-8").partition(TABLE.partition("\n")[0])[0]


def _row(name: str, real: dict[str, Any], testbed: dict[str, Any]) -> tuple[str, ...]:
    entry = real.get(name)
    metric, divergence = (CONTRADICTED if each == VERDICT[False] else each for each in real_status(name, entry))
    n = NONE if entry is None else re.sub(r"(\d+) of each of (\d+) tasks", r"\2 x \1", examples_of(entry))
    small = _said(testbed.get(name))
    return _short_title(name), words(name)["short"], metric, divergence, _number(name, entry), n, small


def _said(entry: dict[str, Any] | None) -> str:
    """`status` as the page words it."""
    found = status(entry)
    return CONTRADICTED if found == VERDICT[False] else found


def _short_title(name: str) -> str:
    """Paper and number: Keyformer, Fig. 7."""
    return re.split(": | with | and appendix | in answers ", load(name).title)[0]


def _number(name: str, entry: dict[str, Any] | None) -> str:
    """`number` of findings.yaml with the recorded numbers in it; the whole sentence where it does not name them."""
    if entry is None:
        return NONE
    sentences = " | ".join([entry.get("divergence", {}).get("words", ""), entry["words"]])

    def filled(match: re.Match[str]) -> str:
        found = re.search(rf"{re.escape(match[1])} ({INTERVAL})", sentences)
        return found[1].replace(" … ", "..") if found else ""

    template = words(name).get("number", "")
    parts = [filled(match) for match in re.finditer(r"\{(.+?)\}", template)]
    if not parts or "" in parts:
        return str(entry["words"])
    return re.sub(r"\{(.+?)\}", filled, template)


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
    pages = {FINDINGS: text, JUDGEMENTS: judgements}
    return write_or_check(pages, "python -m experiments.findings", arguments, __doc__)


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
