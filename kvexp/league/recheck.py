"""Measure random rows of league entries again, and hold them against what the entries say.

Judged are teacher-forced quantities alone: the entry's own text is fed to the full cache and to the method, and mean KL
and log-probabilities must be those of the entry within a tolerance that was measured across thread counts, instruction
sets and torch versions (league/tolerance.json). What a model writes freely is told and not judged: one rounding may
change it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvexp.config.compose_errors import explained
from kvexp.config.settings import Settings
from kvexp.config.target_allowlist import guard
from kvexp.config.typed_methods import FILE_KEY
from kvexp.diagnose.case import Case
from kvexp.diagnose.runs import cases, with_limit_of
from kvexp.errors import ConfigError
from kvexp.evaluate.example_prompts import prompt_of
from kvexp.generate.divergence import divergence_from_full, read_questions
from kvexp.league.entry_file import NUMBERS, Entry
from kvexp.paths import CONF
from kvexp.record import identity
from kvexp.record.canonical_json import load
from kvexp.session import Session, active
from kvexp.sweep.job_queue import HydraJob, runs_of

ROWS = 5  # of every entry, drawn at random
# Until they are measured (`kvexp league tolerance`): nats per token, of a row's mean.
UNMEASURED = {"kl": 0.02, "full_logprob": 0.005, "logprob": 0.02}


@dataclass(frozen=True)
class CheckedRow:
    """One row measured again.

    found, said: its NUMBERS; why: what is wrong with it, or ""; same_output: None where it was not asked.
    """

    example: str
    found: dict[str, float]
    said: dict[str, float]
    why: str
    same_output: bool | None = None

    def distance(self, name: str) -> float:
        """By how much a number differs, in nats per token."""
        return abs(self.found[name] - self.said[name])


def tolerance_of(folder: Path) -> dict[str, float]:
    """The tolerance of each of NUMBERS: as measured, or `UNMEASURED` where league/tolerance.json is not there."""
    file = folder / "tolerance.json"
    if not file.exists():
        return dict(UNMEASURED)
    try:
        found = load(file)["tolerance"]
        return {name: float(found[name]) for name in NUMBERS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} holds no tolerance: {error}; make it again with kvexp league tolerance") from error


def drawn_rows(entry: Entry, count: int, seed: int) -> list[dict[str, Any]]:
    """Rows of an entry to check: other ones for other seeds, in the task's order."""
    draw = random.Random(f"{seed} {entry['hash']}")
    rows = draw.sample(entry["rows"], min(count, len(entry["rows"])))
    return sorted(rows, key=lambda row: int(row["index"]))


def entry_settings(entry: Entry, allow_code: Sequence[str] = ()) -> Settings:
    """The settings that an entry's words make; ConfigError where its run is another one today.

    allow_code: words that choose a user's method (method=MODULE.CLASS, +method_file=FILE), which a person has typed;
    words of the entry itself never load code, nor any key that has to be typed.
    """
    words = list(entry["words"])
    names_a_file = any(word.lstrip("+").partition("=")[0] == FILE_KEY for word in words)
    if entry.get("code") or names_a_file:
        if not allow_code:
            raise ConfigError("its method is a user's code: name it, once it is read and trusted (--method-file FILE)")
        words = [word for word in words if word.lstrip("+").partition("=")[0] != FILE_KEY]
        words = [word for word in words if word.partition("=")[0] != "method"] + list(allow_code)
    guard()
    session = Session(typed_keys=set())
    with active(session), initialize_config_dir(str(CONF), version_base="1.3"):
        try:
            config = compose("config", [*words, "divergence=true", f"limit={_limit(entry)}"], return_hydra_config=True)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(explained(error, words)) from error
        choices = {str(key): str(value) for key, value in config.hydra.runtime.choices.items() if value is not None}
        plain = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        (settings,) = runs_of(HydraJob(plain, words, choices, None), session)
    if identity(settings.identity) != entry["hash"]:
        raise ConfigError(
            f"its words make the run {identity(settings.identity)} today, not {entry['hash']}: model, data or settings "
            "are others"
        )
    return settings


def _limit(entry: Entry) -> int:
    return 1 + max(int(row["index"]) for row in entry["rows"])


def check_entry(
    entry: Entry, rows: Sequence[Mapping[str, Any]], tolerance: Mapping[str, float], settings: Settings, outputs: bool
) -> Iterator[CheckedRow]:
    """Measure these rows of an entry again; loads the model. outputs: also generate, and say whether it is the same."""
    wanted = [{"example": row["example"], "index": row["index"]} for row in rows]
    by_name = {row["example"]: row for row in rows}
    settings = with_limit_of(settings, _limit(entry))
    for given, case, example in cases(settings, wanted):
        row = by_name[given["example"]]
        said = {name: float(row[name]) for name in NUMBERS}
        digest = prompt_of(settings, case.model, case.tokenizer, example).digest
        found = forced_numbers(case, row["tokens"], bool(row["first_by_prefill"]))
        why = [
            f"{name} is {found[name]:.5f} here and {said[name]:.5f} in the entry"
            for name in NUMBERS
            if not abs(found[name] - said[name]) <= tolerance[name]
        ]
        if row.get("prompt_digest") not in (None, digest):
            why.insert(0, f"its prompt has the digest {digest} here and {row['prompt_digest']} in the entry")
        same = _same_output(case, row) if outputs else None
        yield CheckedRow(row["example"], found, said, "; ".join(why), same)


def forced_numbers(case: Case, tokens: Sequence[int], first_by_prefill: bool) -> dict[str, float]:
    """NUMBERS of one example along a text: means over the tokens that the prefill does not predict."""
    contexts = [case.full().prefill_prompt(), case.prefill_prompt()]
    if case.question:
        read_questions(case.model, contexts, [case.question])
    ((line,),) = divergence_from_full(case.model, contexts[0], contexts[1:], [list(tokens)])
    skip = int(first_by_prefill)
    return {name: float(np.mean(getattr(line, name)[skip:])) for name in NUMBERS}


def _same_output(case: Case, row: Mapping[str, Any]) -> bool | None:
    if row.get("output_sha256") is None:
        return None
    text = case.tokenizer.decode(case.generate_again().tokens[0], skip_special_tokens=True)
    return bool(hashlib.sha256(text.encode()).hexdigest() == row["output_sha256"])
