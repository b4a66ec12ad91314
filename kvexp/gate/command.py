"""The command `kvexp gate`: both models asked, prompt by prompt, the rows kept, and a verdict as exit code."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count, zip_longest
from typing import Any

import numpy as np
from rich.text import Text

from kvexp.gate.served import as_texts, served
from kvexp.gate.sides import Answer, Prompt, Role, Side, SideError, Token, divergence
from kvexp.gate.terms import EXIT, WORDS, Judgement, Terms, is_json, prompts_of
from kvexp.results import promise, stats
from kvexp.results.blocks import Column, estimate, numeric, plain, print_columns
from kvexp.results.divergence import PerExample, share_interval
from kvexp.run.store import OWN, Line, Run
from kvexp.util.errors import CacheError, ConfigError
from kvexp.util.fields import keys_text
from kvexp.util.files import check_writable, explained, locked, replace
from kvexp.util.output import Console, duration, say, tells_errors
from kvexp.util.progress import Progress
from kvexp.util.strict_json import Json, pretty

REPORT = "report.json"
ROLES: tuple[Role, Role] = ("baseline", "candidate")
PROBED = 8  # tokens of the answers by which the time is estimated
SAME = 0.01  # nats by which a log-probability may differ from a recorded one: of a KL it moves 0.00005
TROUBLE = (SideError, CacheError)

ABOUT = """usage: kvexp gate baseline=URL candidate=URL data=FILE [KEY=VALUE ...]
                  [--json] [--dry-run]

Does the candidate (a build, a cache format, a port) still answer as its
baseline does? (docs/gate.md)

Exit code: 0 pass, 1 fail, 3 undecided or cut short, 2 a wrong command.
A server's token is read from KVEXP_BASELINE_TOKEN and
KVEXP_CANDIDATE_TOKEN. The same command goes on where it was cut short.
"""
OPTIONS = """  --json       print the report as JSON, all else goes to the standard error
  --dry-run    ask both servers, and say how long it takes at most"""


@tells_errors(ConfigError, OSError, *TROUBLE)
def main(words: list[str]) -> int:
    """Run `kvexp gate`; exit code as of EXIT, 2 for a wrong request and for a server that cannot be asked at all."""
    if not words or words[0] in ("-h", "--help"):
        say(f"{ABOUT}\n{keys_text(WORDS)}\n\n{OPTIONS}")
        return 0 if words else 2
    flags = [word for word in words if word.startswith("-")]
    if wrong := [word for word in flags if word not in ("--json", "--dry-run")]:
        raise ConfigError(f"gate has no option {wrong[0]}; it has --json, --dry-run and --help")
    terms = Terms.of([word for word in words if word not in flags])
    with contextlib.ExitStack() as stack:
        if "--json" in flags:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        gate = Gate(terms, stack)
        report = gate.run(dry="--dry-run" in flags)
        if report is None:
            return 0
        gate.show(report)
    if "--json" in flags:
        say(json.dumps(report, indent=2, allow_nan=False))
    return int(report["exit_code"])


def opened(role: Role, words: str, terms: Terms, stack: contextlib.ExitStack) -> Side:
    """The model that these words name; the stack closes what it needs."""
    kind, _, place = words.partition(":")
    if kind in ("llama_cpp", "transformers"):
        from kvexp.gate.local import ENGINES  # late: torch

        return ENGINES[kind](role, place)
    return served(role, words, terms.timeout, stack)


class Gate:
    """Both models, the prompts as both read them, and the folder of their rows."""

    def __init__(self, terms: Terms, stack: contextlib.ExitStack) -> None:
        self.terms, self.prompts = terms, prompts_of(terms)
        check_writable(terms.outputs_dir)
        self.baseline, self.candidate = (opened(role, getattr(terms, role), terms, stack) for role in ROLES)
        if self.baseline.by_text != self.candidate.by_text:
            self.baseline, self.candidate = as_texts(self.baseline), as_texts(self.candidate)
        self.sides = (self.baseline, self.candidate)
        self.read = [self._read(prompt) for prompt in self.prompts]
        for side in self.sides:
            longest = max(range(len(self.read)), key=lambda place: len(self.read[place]))
            tokens = len(self.read[longest]) + terms.max_tokens
            if side.context is not None and tokens > side.context and not side.by_text:
                raise ConfigError(
                    f"{side.role}: prompt {self.prompts[longest].name} and its answer have {tokens} tokens, and "
                    f"{side.name} holds {side.context}: serve it with a longer context, or lower max_tokens"
                )

    def _read(self, prompt: Prompt) -> list[Token]:
        """The prompt as both models are fed it; ConfigError where their tokenizers or chat templates differ."""
        ours, theirs = (side.tokenize(prompt) for side in self.sides)
        if ours != theirs:
            pairs = enumerate(zip_longest(ours, theirs))
            place, pair = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
            raise ConfigError(
                f"the tokenizers or chat templates differ: of prompt {prompt.name} the baseline makes {len(ours)} "
                f"tokens and the candidate {len(theirs)}, first different at token {place + 1} ({pair[0]} and "
                f"{pair[1]}); the two cannot be compared"
            )
        if not ours:
            raise ConfigError(f"prompt {prompt.name} has no tokens; leave it out")
        return ours

    def run(self, *, dry: bool = False) -> Json | None:
        """Measure what is not there yet, and report; None for a dry run."""
        terms, n = self.terms, len(self.prompts)
        for side in self.sides:
            say(f"{side.role + ':':<10} {side.name} ({side.note})")
        say(f"greedy answers of at most {terms.max_tokens} tokens, compared at their first {terms.places}")
        least, most = terms.fails_from(n), terms.passes_to(n)
        needed = promise.prompts_needed(terms.share, terms.error)
        passes = f"pass with at most {most} beyond the limit" if most >= 0 else f"cannot pass ({needed} or more can)"
        fails = f"fail with {least} or more" if least is not None else "cannot fail"
        say(f"{n} prompts {passes}, {fails} (share {terms.share:g} at confidence {terms.confidence:g})")
        seconds = self.seconds()
        if dry:
            say(f"at most about {duration(seconds * n)} from nothing")
            return None
        run = self._run_folder()
        with run.claim(timeout=0):
            rows = {row["example"]: row for row in run.rows()}
            left = [place for place in range(n) if str(place) not in rows]
            kept = f"{len(rows)} of them have rows; " if rows else ""
            say(f"{kept}at most about {duration(seconds * len(left))}; rows in {run.path}", flush=True)
            trouble = ""
            try:
                self._measure(run, left, rows)
                run.finish(len(rows))
            except TROUBLE as error:
                trouble = str(error)
            lines = {line["example"]: line for line in run.divergence().values()}
            report = self.report([rows[key] for key in sorted(rows, key=int)], lines, trouble)
            with explained(run.path / REPORT), locked(run.path):
                replace(run.path / REPORT, pretty(report))
        return report

    def seconds(self) -> float:
        """Seconds that a prompt takes at most, by the first: reading it, tokens of an answer, places, of each model."""
        terms, ids, total = self.terms, self.read[0], 0.0
        size = float(np.mean([len(tokens) for tokens in self.read])) / len(ids)
        for side in self.sides:
            cold, warm, more = (_timed(side.answer, ids, new) for new in (1, 1, PROBED))
            text = side.answer(ids, 2).tokens
            single, double = (_timed(_walk, side, ids, text[:new], terms.top) for new in (1, 2))
            total += cold * size + terms.max_tokens * max(0.0, more - warm) / (PROBED - 1)
            total += double + terms.places * max(0.0, double - single)
        return total

    def _run_folder(self) -> Run:
        """The first folder of these models and prompts that is not finished, and whose rows they would still give."""
        terms = self.terms
        fed = hashlib.sha256(json.dumps(self.read).encode()).hexdigest()
        config: Json = {
            "gate": {"places": terms.places, "max_tokens": terms.max_tokens, "top": terms.top, "prompts": fed},
            **{side.role: side.identity() for side in self.sides},
        }
        for number in count(1):
            run = Run.open(terms.outputs_dir, {**config, "number": number}, {"model": self.baseline.name})
            if not run.finished:
                lines = list(run.divergence().values())
                if not lines or self._still_the_same(lines):
                    return run
                say(f"the models no longer give the rows of {run.path}: measured anew")
        raise AssertionError

    def _still_the_same(self, lines: Sequence[Line]) -> bool:
        """Whether both models give the recorded log-probability of the least likely first token again."""
        line = min(lines, key=lambda line: line["full_logprob"][0])
        ids, token = self.read[int(line["example"])], line["tokens"][0]
        for side, name in zip(self.sides, ("full_logprob", "logprob"), strict=True):
            side.answer(ids, 1)  # the prompt is read as it was then, in one piece
            (place,) = side.places(ids, [token], self.terms.top)
            if abs(place.logprob(token) - line[name][0]) > SAME:
                return False
        return True

    def _measure(self, run: Run, left: Sequence[int], rows: dict[str, Json]) -> None:
        """Make the rows of the prompts that are left, until nothing can change a fail."""
        total = len(self.prompts)
        with Progress("gate", total, total - len(left), "prompts") as progress:
            for place in left:
                if Judgement.of(self.terms, list(rows.values())).ends(total):
                    return
                row, line = self._compared(place)
                run.append_divergence([line])
                run.append(row)
                rows[row["example"]] = row
                progress.advance()

    def _compared(self, place: int) -> tuple[Json, Line]:
        """The row of a prompt, and its line as of divergence.jsonl."""
        ids, prompt, start = self.read[place], self.prompts[place], time.monotonic()
        ours, theirs = answers = [side.answer(ids, self.terms.max_tokens) for side in self.sides]
        if ours.prompt_tokens != theirs.prompt_tokens:
            raise ConfigError(
                f"the tokenizers differ: of prompt {prompt.name} the baseline reads {ours.prompt_tokens} tokens and "
                f"the candidate {theirs.prompt_tokens}; the two cannot be compared"
            )
        if not all(answer.tokens for answer in answers):
            raise SideError(f"no token came in answer to prompt {prompt.name}: leave it out")
        text = ours.tokens[: self.terms.places]
        line: Line = {"example": str(place), "index": place, "text": OWN, "first_by_prefill": False, "tokens": text}
        line |= {name: [] for name in ("kl", "full_logprob", "logprob", "same_top1")}
        bounded = False
        places = [side.places(ids, text, self.terms.top) for side in self.sides]
        for full, other, token in zip(*places, text, strict=True):
            if full.whole and other.whole and len(full.tokens) != len(other.tokens):
                sizes = f"{len(other.tokens)} tokens, and the baseline's {len(full.tokens)}"
                raise SideError(f"candidate: another vocabulary, of {sizes}")
            bounded |= not (full.whole and other.whole)
            line["kl"].append(divergence(full, other))
            line["same_top1"].append(int(full.likeliest == other.likeliest))
            line["full_logprob"].append(full.logprob(token))
            line["logprob"].append(other.logprob(token))
        row = {"example": str(place), "index": place, "name": prompt.name, "prompt_tokens": len(ids)}
        row |= {"baseline": _kept(ours), "candidate": _kept(theirs), "lower_bound": bounded}
        row |= {"kl": float(np.mean(line["kl"])), "top1": float(np.mean(line["same_top1"]))}
        row["change"] = float(np.mean(np.subtract(line["logprob"], line["full_logprob"])))
        return row | {"seconds": {"all": time.monotonic() - start}}, line

    def report(self, rows: Sequence[Json], lines: Mapping[str, Line], trouble: str = "") -> Json:
        """All that is said of these rows. trouble: why it was cut short, if it was."""
        terms, judgement = self.terms, Judgement.of(self.terms, rows)
        verdict = "undecided" if trouble else judgement.verdict
        low, high = judgement.bounds
        known = ("kl", "top1", "length", "valid", "share", "confidence", "places", "max_tokens", "top")
        return {
            **{"verdict": verdict, "exit_code": EXIT[verdict], "trouble": trouble or None},
            **{"terms": {name: getattr(terms, name) for name in known}, "limits": terms.limits},
            **{side.role: side.identity() for side in self.sides},
            **{"planned": len(self.prompts), "measured": len(rows), "n": judgement.n, "beyond": judgement.beyond},
            **{"not_known": judgement.unknown, "share_low": low, "share_high": high},
            **{"needed": judgement.needed if verdict == "undecided" and not trouble else None},
            **{"all": _in_all(rows, lines), "prompts": [{**row, "state": terms.state(row)} for row in rows]},
        }

    def show(self, report: Json) -> None:
        """Print a report: a line per prompt, all of them in one, and the verdict as sentences."""
        rows, console = report["prompts"], Console(markup=False, width=None if sys.stdout.isatty() else 110)
        if rows:
            bounded = any(row["lower_bound"] for row in rows)
            table = [*({**row, **_lengths(row)} for row in rows), {**report["all"], "name": "all"}]
            console.print()
            print_columns(table, _columns(bounded, report["terms"]), 1, console)
        for line in said(report):
            console.print(Text(line), soft_wrap=not console.is_terminal)


def _timed(function: Callable[..., Any], *words: Any) -> float:
    start = time.monotonic()
    function(*words)
    return time.monotonic() - start


def _walk(side: Side, *words: Any) -> None:
    for _ in side.places(*words):
        pass


def _kept(answer: Answer) -> Json:
    count, valid = len(answer.tokens), is_json(answer.text)
    return {"output": answer.text, "new_tokens": count, "ended": answer.ended, "valid": valid}


def _in_all(rows: Sequence[Json], lines: Mapping[str, Line]) -> Json:
    """Means over all rows with their 95 % intervals, None where the prompts are too few."""
    measured = PerExample.of([lines[row["example"]] for row in rows])
    if measured is None:
        return {}
    total, squares = measured.tokens.sum(), measured.change_squared.sum()
    ours, theirs = (np.array([row[role]["new_tokens"] for row in rows], dtype=float) for role in ROLES)
    kl, differs = (share_interval(sums, measured.tokens, stats.LEVEL) for sums in (measured.kl, measured.differs))
    longer = stats.interval_of_mean(theirs - ours)
    numbers = {
        **{"kl": measured.kl.sum() / total, "kl_low": kl[0], "kl_high": kl[1]},
        **{"top1": 1 - measured.differs.sum() / total, "top1_low": 1 - differs[1], "top1_high": 1 - differs[0]},
        **{"change": measured.change.sum() / total, "change_rms": math.sqrt(squares / total)},
        **{"ours": ours.mean(), "theirs": theirs.mean(), "longer": (theirs - ours).mean()},
        **{"longer_low": longer[0], "longer_high": longer[1]},
    }
    finite = {name: float(value) if math.isfinite(value) else None for name, value in numbers.items()}
    return {**finite, "tokens": int(total)}


def _lengths(row: Json) -> Json:
    return {
        name: f"{row[role]['new_tokens']}{'' if row[role]['ended'] else '+'}"
        for name, role in (("ours", "baseline"), ("theirs", "candidate"))
    }


def _columns(bounded: bool, terms: Mapping[str, Any]) -> list[Column]:
    def valid(row: Mapping[str, Any]) -> str:
        return " ".join("yes" if row[role]["valid"] else "no" for role in ROLES if role in row)

    return [
        plain("name", "prompt", right=False),
        numeric("KL at\nleast" if bounded else "KL", "kl", 5),
        numeric("same\ntop-1 %", "top1", 1, 100),
        numeric("chosen\ntoken", "change", 4, sign="+"),
        plain("ours", "tokens,\nbaseline"),
        plain("theirs", "tokens,\ncandidate"),
        *([Column("JSON,\nboth", valid)] if terms["valid"] else []),
        plain("state", "limit", right=False),
    ]


def said(report: Mapping[str, Any]) -> list[str]:
    """The lines below the table: what the numbers are, the verdict, and what would change it."""
    terms, whole, lines = report["terms"], report["all"], []
    if whole:
        least = "at least " if any(row["lower_bound"] for row in report["prompts"]) else ""
        change, rms = whole["change"], whole["change_rms"]
        lines.append(
            f"KL {least}{estimate(whole, 'kl', 5)} nats per token over {whole['tokens']} tokens of "
            f"{report['measured']} prompts (95 % interval), same likeliest token {estimate(whole, 'top1', 1, 100)} %, "
            f"chosen token {change:+.4f} nats (rms {rms:.4f}), answers longer by {estimate(whole, 'longer', 1)} tokens "
            f"(+: cut off at {terms['max_tokens']})."
        )
        if least:
            lines.append("A lower bound, since not all log-probabilities were given: by it kl= can fail, not pass.")
    if without := report["measured"] - report["n"]:
        lines.append(f"{without} prompts count nowhere: there the baseline's own answer is no JSON.")
    if report["trouble"]:
        lines.append(f"Cut short: {report['trouble']}. The rows are kept; the same command goes on.")
    share, confidence = terms["share"], terms["confidence"]
    counts = f"{report['beyond']} of {report['n']} prompts are beyond the limit"
    stays = f"of new prompts of this kind stay {report['limits']}"
    bounds = {
        "pass": f"at least {math.floor(1000 * report['share_low']) / 1000:g}",
        "fail": f"at most {math.ceil(1000 * report['share_high']) / 1000:g}",
    }
    if bound := bounds.get(report["verdict"]):
        lines.append(f"{report['verdict']}: {bound} {stays} ({counts}; confidence {confidence:g}).")
        return lines
    more = f"about {report['needed'] or 'no number of'} prompts would decide at this rate"
    if report["not_known"]:
        more = f"{report['not_known']} may be, which a lower bound cannot tell: use top1=, or servers that give all"
    more = "" if report["trouble"] else f"; {more.replace('about no', 'no')}"
    lines.append(f"undecided whether {share:g} {stays}: {counts}{more}.")
    return lines
