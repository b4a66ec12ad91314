"""While an answer grows, does scoring slots beat keeping random ones? The study of docs/decoding.md.

    python -m experiments.studies.decoding run FOLDER [model=NAME] [--texts N] [--kinds KIND ...] [--dry-run]
    python -m experiments.studies.decoding size FOLDER
    python -m experiments.studies.decoding report FOLDER [--page docs/decoding.md]

`run` feeds texts of its own to the model, 64 tokens at a time, once with the full cache and once with each arm, an
eviction after every 64; with `--every 1` token by token, several texts and all arms in one forward. It appends one line
for each text and arm to FOLDER/rows.jsonl; what is there already is not computed again, and several processes may share
the work (`--shard i/n`). `--dry-run` says what it would compute, and hours. `size` says how many texts the spread of
the first ones asks for, and no mean. `report` prints the tables.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

import kvexp
from experiments.lib.tables import markdown
from experiments.studies import carried_out, write_tables
from kvexp.core import Budget, CacheConfig, Cadence, Method
from kvexp.generate import divergence_from_full, prefill_together
from kvexp.hf import EvictionCache
from kvexp.hf.calibrate import QUERIES
from kvexp.hf.traits import CACHE_ARGUMENT
from kvexp.methods import GKV, RKV, EpiKV, Full, LagKV, SnapKV, TriAttention, VaSE, Window
from kvexp.methods import Random as Chance
from kvexp.results.divergence import holm_corrected
from kvexp.results.stats import t_quantile, t_tail
from kvexp.run.jobs import composed_model
from kvexp.run.model_spec import load, model_digest
from kvexp.util.errors import ConfigError
from kvexp.util.files import locked
from kvexp.util.output import say, watch_pipes
from kvexp.util.progress import Progress

# -- the design, fixed before anything was run -------------------------------------------------------------------------

TOKENS = 4096  # of prompt and trace
STEP = 64  # tokens between evictions, fed in one forward; and newest tokens that every rule protects
SHARES = (2, 4, 8, 16)  # budgets: TOKENS over these, prompt and newest tokens included, the same for all arms
LEAST = 64  # slots that prompt and window must leave free, else a cell is left out
MARGIN = 1.25  # times as many slots: what scoring must be worth at least
FIRST, MOST = 16, 64  # texts of each kind, before and after `size` has said how many the spread asks for
SHOWN = 6  # texts of a cell that is printed
ROOM = 0.05  # of log KL, within which a mean is to be known
PROMPT, SINKS = "prompt", "sinks"  # what is never evicted: the whole prompt, or its first four tokens
LEVEL = 0.95  # one-sided

# The six rules of the reduced grid, and three that came after it. All protect the newest STEP tokens.
RULES: dict[str, Method] = {
    "redrawn": Chance(redraw=True, protect_recent=STEP),
    "recency": Window(),
    "snapkv": SnapKV(window=STEP, pool="avg", softmax="older", decoding=True),
    "rkv": RKV(window=STEP),
    "vase": VaSE(window=STEP),
    "triattention": TriAttention(pruning="per_head", protect_recent=STEP),
    "gkv": GKV(window=STEP),
    "lagkv": LagKV(against="previous", n_sinks=0, protect_recent=STEP),
    "epikv": EpiKV(protect_recent=STEP),
}
SCORED = ("snapkv", "rkv", "vase", "triattention")
LATER = ("gkv", "lagkv", "epikv")  # with the prompt kept alone, and corrected among themselves: the others' tests stay
REDUCED = ("solution", "ledger")  # kinds of text of the reduced grid: that do not and that do need their prompt
AGES = (4, 8, 16, 32, 57)  # ends of blocks between a code and its question
BEGIN = "<!-- decoding: made by python -m experiments.studies.decoding report FOLDER --page docs/decoding.md -->"
END = "<!-- end of decoding -->"
ROWS = 4  # of logits compared at a time
# Texts that are fed token by token in one forward: attention rows of more leave a processor's cache (a GPU takes 16).
TOGETHER = 2
# Seconds for an arm of one text, where FOLDER has none yet: SmolLM2-135M on one core. In blocks, rkv at 2,048 slots
# takes 109; token by token, recency and redrawn take 30, triattention about 100, snapkv 300 at 512 slots.
SECONDS, SECONDS_EACH = 31.0, 120.0


@dataclass(frozen=True)
class Arm:
    """A cache that is compared with the full one: a rule, what is protected besides, and slots of a kv head.

    every: tokens between evictions.
    """

    rule: str
    kept: str
    slots: int
    every: int = STEP

    def cache(self, calibration: Any) -> CacheConfig:
        """The cache's configuration; calibration: of the model's queries, None where the rule needs none."""
        method = RULES[self.rule]
        return CacheConfig(
            method,
            Budget(tokens=self.slots, counts_self=False),
            Cadence(every=self.every),
            keep="prompt" if self.kept == PROMPT else "span",
            calibration=calibration if method.needs.calibration else None,
        )


def margin(share: int, tokens: int = TOKENS) -> int:
    """Slots of the margin's arm of one budget."""
    return int(tokens // share // STEP * STEP * MARGIN)


def arms(share: int, prompt: int, tokens: int = TOKENS) -> list[Arm]:
    """The arms of one budget for a prompt of so many tokens, the margin's among them."""
    slots = tokens // share // STEP * STEP
    chosen = [Arm(rule, SINKS, slots) for rule in RULES if rule not in LATER]
    if slots - STEP - prompt >= LEAST:
        chosen += [Arm(rule, PROMPT, slots) for rule in RULES]
        chosen.append(Arm("redrawn", PROMPT, margin(share, tokens)))
    return chosen


# -- texts, each a function of its kind and number ---------------------------------------------------------------------

GOODS = ("rope", "lamp oil", "tar", "nails", "canvas", "salt", "candles", "wire", "chalk", "felt", "resin", "twine")
GOODS += ("lead", "wax", "flour", "paint", "glue", "slate", "cork", "brass", "tin", "soap", "hemp", "pitch")
PEOPLE = ("Ada", "Bo", "Cleo", "Dov", "Edda", "Finn", "Gro", "Hal", "Ines", "Jory", "Kaja", "Levi", "Mona", "Nils")
PLACES = ("harbour", "mill", "chapel", "quarry", "depot", "ferry", "school", "tower", "market", "bridge")
NUMBERS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


@dataclass(frozen=True)
class Text:
    """A prompt and the lines of a trace that follow it, more of them than are needed."""

    prompt: str
    lines: Iterator[str]


def ledger(dice: Random) -> Text:
    """A table of codes and prices, then bookings that use codes and never say what they stand for before the sum."""
    goods = dice.sample(GOODS, 16)
    codes = {good: f"{chr(65 + dice.randrange(26))}{dice.randrange(10, 100)}" for good in goods}
    price = {good: dice.randrange(3, 60) for good in goods}
    table = "\n".join(f"{codes[good]}: {good}, {price[good]} marks" for good in goods)

    def lines() -> Iterator[str]:
        total, day = 0, 0
        while True:
            day += 1
            who, where = dice.choice(PEOPLE), dice.choice(PLACES)
            yield f"Day {day}. {who} came from the {where}."
            for good in dice.sample(goods, dice.randrange(1, 4)):
                count = dice.randrange(2, 9)
                total += count * price[good]
                yield f"Booked {count} of {codes[good]}: {count * price[good]} marks for {good}; in all {total} marks."

    return Text(f"Price list of the store. Each booking names a code of this list.\n{table}\n\nBookings:\n", lines())


def solution(dice: Random) -> Text:
    """A sum worked out step by step; every step says again what the next one needs."""
    start, who = dice.randrange(100, 900), dice.choice(PEOPLE)
    goods = dice.choice(GOODS)
    prompt = f"{who} has {start} crates of {goods}. Many changes follow. Keep count, step by step.\n\nSolution:\n"

    def lines() -> Iterator[str]:
        now, step = start, 0
        while True:
            step += 1
            amount, other, where = dice.randrange(2, 90), dice.choice(PEOPLE), dice.choice(PLACES)
            kind = dice.randrange(4)
            if kind == 0 or now < 200:
                yield f"Step {step}. {other} brings {amount} more from the {where}. {now} + {amount} = {now + amount}."
                now += amount
            elif kind == 1:
                yield f"Step {step}. {amount} crates go to the {where} with {other}. {now} - {amount} = {now - amount}."
                now -= amount
            elif kind == 2:
                half, rest = divmod(now, 2)
                yield f"Step {step}. Half of {now} is {half}, with {rest} over; {other} checks it at the {where}."
            else:
                yield f"Step {step}. So there are {now} crates of {goods} now, and {other} writes {now} in the book."

    return Text(prompt, lines())


KINDS: dict[str, Callable[[Random], Text]] = {
    "solution": solution, "ledger": ledger, "codes": solution,
}  # fmt: skip


@dataclass(frozen=True)
class Tokens:
    """A text as token ids [n]; prompt: how many are the prompt's; codes: age -> a code's places when asked for."""

    ids: list[int]
    prompt: int
    codes: dict[int, range]


def tokens_of(kind: str, number: int, tokenizer: Any, count: int = TOKENS) -> Tokens:
    """Text `number` of a kind, cut to `count` tokens.

    Of kind codes, the trace begins with a code for each of AGES, and asks for each once, so many evictions later.
    """
    dice = Random(f"decoding {kind} {number}")
    text = KINDS[kind](dice)
    ids: list[int] = tokenizer(text.prompt, verbose=False).input_ids
    prompt, ranges = len(ids), dict[int, range]()

    def add(words: str) -> range:
        added = tokenizer(words, add_special_tokens=False, verbose=False).input_ids
        ids.extend(added)
        return range(len(ids) - len(added), len(ids))

    gates = dict(zip(AGES, dice.sample(PLACES, len(AGES)), strict=True))
    codes = {age: " ".join(str(dice.randrange(10)) for _ in range(6)) for age in AGES}
    if kind == "codes":
        for age, gate in gates.items():
            add(f"Note: the code of the {gate} gate is {codes[age]}.\n")
    said = len(ids)
    for line in text.lines:
        for age, gate in gates.items() if kind == "codes" else ():
            due = prompt + (-(-(said - prompt) // STEP) + age - 1) * STEP
            if age not in ranges and len(ids) >= due:
                add(f"The code of the {gate} gate was")
                ranges[age] = add(f" {codes[age]}")
                add(".\n")
        add(f"{line}\n")
        if len(ids) >= count:
            break
    if len(ids) < count:
        raise ConfigError(f"text {number} of kind {kind} has {len(ids)} tokens, and {count} are needed")
    return Tokens(ids[:count], prompt, {age: at for age, at in ranges.items() if at.stop <= count})


# -- running -----------------------------------------------------------------------------------------------------------

Row = dict[str, Any]


def mean(values: Any) -> float:
    """The mean; NaN of nothing."""
    return float(np.mean(values)) if len(values) else math.nan


def evicted_from(text: Tokens, slots: int, every: int) -> int:
    """The first prediction after the prompt by a token that is fed after an eviction; KL before it is exactly 0."""
    return 1 + max(0, -(-(slots + 1 - text.prompt) // every)) * every


@dataclass
class Compared:
    """One arm's numbers along a text, token by token from the first one after the prompt; lists of equal length."""

    kl: list[float]
    same: Sequence[int]  # 1 where both rank the same token first
    logprob: list[float]

    def row(self, text: Tokens, arm: Arm, more: int, full: Sequence[float]) -> Row:
        """The mean KL and top-1 agreement after this budget's first eviction, by quarter, and the NLL of codes.

        more: slots of the margin's arm; kl_late is of the tokens after its first eviction, which all arms then have.
        """
        first, late = (evicted_from(text, slots, arm.every) for slots in (arm.slots, more))
        kl, same = np.array(self.kl)[first:], np.array(self.same)[first:]
        worst = np.sort(kl)[::-1][: max(1, len(kl) // 100)]
        ages = {str(age): [at.start - text.prompt, at.stop - text.prompt] for age, at in text.codes.items()}
        return {
            "kl": mean(kl),
            "kl_late": mean(self.kl[late:]),
            "top1": mean(same),
            "tokens": len(kl),
            "worst": float(worst.sum() / max(kl.sum(), 1e-12)),
            "quarters": [mean(quarter) for quarter in np.array_split(kl, 4)],
            "nll": -mean(self.logprob[first:]),
            "full_nll": -mean(full[first:]),
            "codes": {age: -mean(self.logprob[a:b]) for age, (a, b) in ages.items()},
            "full_codes": {age: -mean(full[a:b]) for age, (a, b) in ages.items()},
        }


@torch.inference_mode()
def compare(model: Any, text: Tokens, chosen: Sequence[Arm], more: int, seed: int, calibration: Any) -> list[Row]:
    """One row for each arm of one budget, fed block by block, as the full cache is; more: slots of the margin's arm.

    All arms evict after as many tokens, which are fed in one forward.
    """
    (every,) = {arm.every for arm in chosen}
    new = len(text.ids) - text.prompt

    def cache(config: CacheConfig) -> EvictionCache:
        evicting = EvictionCache(model, config, prompt_tokens=text.prompt, max_new_tokens=new, seeds=seed)
        evicting.check_budget([text.prompt], text.prompt)
        evicting.mark_spans([[(0, min(4, text.prompt))]] if config.keep == "span" else None, [text.prompt], text.prompt)
        return evicting.allow_multi_token_steps()

    ids = torch.tensor([text.ids], device=model.device)
    full = cache(CacheConfig(Full()))
    caches = [cache(arm.cache(calibration)) for arm in chosen]
    others = [Compared([], [], []) for _ in chosen]
    seconds = [0.0] * len(chosen)
    logprobs: list[float] = []
    for start in [0, *range(text.prompt, len(text.ids) - 1, every)]:
        stop = text.prompt if start == 0 else min(start + every, len(text.ids))
        block = ids[:, start:stop]
        keep = 1 if start == 0 else stop - start
        follow = ids[0, stop - keep + 1 : stop + 1]
        truth = model(block, use_cache=True, logits_to_keep=keep, **{CACHE_ARGUMENT: full}).logits[0, : len(follow)]
        p = truth.float().log_softmax(-1)
        exponentials = p.exp()
        logprobs += p.gather(-1, follow[:, None])[:, 0].tolist()
        for place, (held, other) in enumerate(zip(caches, others, strict=True)):
            began = time.monotonic()
            logits = model(block, use_cache=True, logits_to_keep=keep, **{CACHE_ARGUMENT: held}).logits
            note(other, p, exponentials, logits[0, : len(follow)], follow)
            seconds[place] += time.monotonic() - began
    made_rows = []
    for arm, other, took in zip(chosen, others, seconds, strict=True):
        made_rows.append(other.row(text, arm, more, logprobs) | {"seconds": round(took, 2)})
    return made_rows


def compare_each(
    model: Any, texts: Sequence[Tokens], chosen: Sequence[tuple[Arm, int]], seeds: Sequence[int], calibration: Any
) -> list[list[Row]]:
    """As `compare`, for arms that evict after every token: all arms and texts take a token in one forward.

    texts: of one kind; chosen: arms, each with the slots of its margin's arm. A list for each text, a row for each arm.
    """
    began = time.monotonic()
    prompts = [text.ids[: text.prompt] for text in texts]
    configs = [CacheConfig(Full()), *(arm.cache(calibration) for arm, _ in chosen)]
    new = max(len(text.ids) - text.prompt for text in texts)
    spans = [[(0, min(4, text.prompt))] for text in texts]
    full, *others = prefill_together(model, prompts, configs, max_new_tokens=new, seeds=seeds, spans=spans)
    divergences = divergence_from_full(model, full, others, [text.ids[text.prompt :] for text in texts])
    seconds = round((time.monotonic() - began) / (len(texts) * len(chosen)), 2)
    rows_by_text = []
    for place, text in enumerate(texts):
        rows = []
        for (arm, more), kl in zip(chosen, divergences, strict=True):
            measured = kl[place]
            numbers = Compared([max(0.0, value) for value in measured.kl], measured.same_top1, measured.logprob)
            rows.append(numbers.row(text, arm, more, measured.full_logprob) | {"seconds": seconds})
        rows_by_text.append(rows)
    return rows_by_text


def note(other: Compared, p: Tensor, full: Tensor, logits: Tensor, follow: Tensor) -> None:
    """Add a block's numbers; p, full [n, V]: log-probabilities of the full cache, and their exponentials.

    made [n, V]: the arm's logits; follow [n]: what came. A few rows at a time, which stay in the processor's cache.
    """
    for start in range(0, len(p), ROWS):
        rows = slice(start, start + ROWS)
        q = logits[rows].float().log_softmax(-1)
        other.kl += (full[rows] * (p[rows] - q)).sum(-1).clamp_min(0).tolist()
        other.same += (p[rows].argmax(-1) == q.argmax(-1)).int().tolist()
        other.logprob += q.gather(-1, follow[rows, None])[:, 0].tolist()


def short(value: Any) -> Any:
    """A row, or what is in it, with numbers of six digits."""
    if isinstance(value, dict):
        return {name: short(item) for name, item in value.items()}
    if isinstance(value, list):
        return [short(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a row is of."""
    return tuple(row[name] for name in ("model", "kind", "number", "rule", "kept", "slots", "every"))


def read_rows(folder: Path) -> list[Row]:
    """The rows of a folder; a last line that was cut off is left out."""
    file, rows = folder / "rows.jsonl", []
    if not file.exists():
        return []
    for line in file.read_text("utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def run(args: argparse.Namespace) -> int:
    """Compute what is missing, or say what that is."""
    folder, (name, spec) = Path(args.folder), composed_model([f"model={args.model}"])
    shard, parts = (int(number) for number in args.shard.split("/"))
    calibration = QUERIES.read(model_digest(spec))
    if calibration is None and any(RULES[rule].needs.calibration for rule in args.rules):
        raise ConfigError(f"triattention needs statistics of {name}'s queries: run kvexp calibrate model={args.model}")
    from kvexp.run.model_spec import tokenizer_of

    tokenizer, rows = tokenizer_of(spec), read_rows(folder)
    done = {key_of(row) for row in rows if row["numerics"] == kvexp.NUMERICS}
    rows = [row for row in rows if (row["every"] == 1) == (args.every == 1)]

    def key(kind: str, number: int, arm: Arm) -> tuple[Any, ...]:
        return key_of({"model": name, "kind": kind, "number": number} | vars(arm))

    units = []
    together, shares = (args.together, [args.shares]) if args.every == 1 else (1, [[share] for share in args.shares])
    # Texts of all kinds side by side, so that the first are of every kind.
    for first in range(args.start, args.texts, together):
        for kind in args.kinds:
            numbers = range(first, min(first + together, args.texts))
            texts = {number: tokens_of(kind, number, tokenizer, args.tokens) for number in numbers}
            longest = max(text.prompt for text in texts.values())
            for group in shares:
                wanted = [
                    (replace(arm, every=args.every), margin(share, args.tokens))
                    for share in group for arm in arms(share, longest, args.tokens)
                    if arm.rule in args.rules and arm.kept in args.kept and (kind != "codes" or arm.kept == PROMPT)
                ]  # fmt: skip
                missing = {(of, arm) for of in numbers for arm, _ in wanted if key(kind, of, arm) not in done}
                wanted = [(arm, more) for arm, more in wanted if any((of, arm) in missing for of in numbers)]
                if wanted and zlib.crc32(f"{kind} {first} {group[0]}".encode()) % parts == shard:
                    units.append((kind, texts, wanted, missing))
    count = sum(len(texts) * len(wanted) for _, texts, wanted, _ in units)
    known = [row["seconds"] for row in rows] or [SECONDS_EACH if args.every == 1 else SECONDS]
    cost = np.median(known)  # the mean holds pauses
    full = sum(len(texts) for _, texts, *_ in units)
    said = "measured in this folder" if rows else "of SmolLM2-135M on one core"
    say(f"{full} texts and budgets, {count} arms: {cost * (count + full) / 3600:.1f} h at {cost:.0f} s each, {said}")
    if args.dry_run or not units:
        return 0
    model, _ = load(spec)
    where = {"device": torch.cuda.get_device_name()} if model.device.type == "cuda" else {}
    folder.mkdir(parents=True, exist_ok=True)
    with Progress("decoding", full, 0, "texts and budgets") as progress:
        for kind, texts, wanted, missing in units:
            seeds = [zlib.crc32(f"{kind} {number}".encode()) for number in texts]
            if args.every == 1:
                results = compare_each(model, list(texts.values()), wanted, seeds, calibration)
            else:
                chosen, (more,) = [arm for arm, _ in wanted], {more for _, more in wanted}
                results = [compare(model, next(iter(texts.values())), chosen, more, seeds[0], calibration)]
            lines = [
                json.dumps({"model": name, "kind": kind, "number": number} | vars(arm) | short(row) | about)
                for (number, text), of_text in zip(texts.items(), results, strict=True)
                for about in [{"prompt": text.prompt, "total": args.tokens, "numerics": kvexp.NUMERICS, **where}]
                for (arm, _), row in zip(wanted, of_text, strict=True)
                if (number, arm) in missing
            ]
            with locked(folder), (folder / "rows.jsonl").open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
            progress.advance(len(texts))
    return 0


# -- judging -----------------------------------------------------------------------------------------------------------

Cell = tuple[str, int]  # kind, budget


def logs(rows: Sequence[Row], name: str = "kl") -> dict[Cell, dict[tuple[str, str], dict[int, float]]]:
    """log of the mean KL of every text: [kind, budget][rule, kept][number]; the margin's arm is called more.

    A kind with another cadence than STEP is kind/every.
    """
    cells: dict[Cell, dict[tuple[str, str], dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        total = row["total"]
        base = {margin(share, total): total // share // STEP * STEP for share in SHARES}
        slots, rule = base.get(row["slots"], row["slots"]), "more" if row["slots"] in base else row["rule"]
        kind = row["kind"] if row["every"] == STEP else f"{row['kind']}/{row['every']}"
        cells[kind, slots][rule, row["kept"]][row["number"]] = math.log(max(row[name], 1e-9))
    return cells


def paired(first: Mapping[int, float], other: Mapping[int, float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Differences by text, of texts that both have."""
    return np.array([first[number] - other[number] for number in sorted(first.keys() & other.keys())])


def size(args: argparse.Namespace) -> int:
    """Print the spread of what the primary tests are of, and the texts that ROOM asks for; no mean."""
    texts = FIRST
    for (kind, slots), cell in sorted(logs(read_rows(Path(args.folder)), "kl_late").items()):
        for rule in SCORED:
            ratios = paired(cell[rule, PROMPT], cell["more", PROMPT])
            if len(ratios) > 1:
                sd = float(ratios.std(ddof=1))
                needs = math.ceil((2.49 * sd / ROOM) ** 2)
                texts = max(texts, needs)
                say(f"{kind} {slots} {rule}: {len(ratios)} texts, sd {sd:.3f}, needs {needs}")
    say(f"texts of each kind: {min(texts, MOST)}")
    return 0


def report(args: argparse.Namespace) -> int:
    """Print the tables, or write them into a page."""
    write_tables(text_of(read_rows(Path(args.folder))), args.page, BEGIN, END)
    return 0


def text_of(rows: Sequence[Row]) -> str:
    """Markdown: what scoring is worth against the margin and against chance; KL of all rules; the prompt; codes."""
    plain = [row for row in rows if row["kind"] != "codes"]
    cells, late, tests = logs(plain), logs(plain, "kl_late"), []
    for (kind, slots), cell in sorted(late.items()):
        for rule in (*SCORED, *LATER):
            if len(ratios := paired(cell[rule, PROMPT], cell["more", PROMPT])) >= SHOWN:
                tests.append((kind, slots, rule, ratios))
    # Two one-sided tests of e = log KL(rule, K) - log KL(redrawn, 1.25 K), Holm's correction over all that have a p.
    corrected = {}
    for family in (SCORED, LATER):
        members = [test for test in tests if test[2] in family]
        p = np.array([two_tails(ratios) for *_, ratios in members]).reshape(-1, 2)
        columns = [holm_corrected(column) for column in p.T]
        corrected |= {test[:3]: tails for test, *tails in zip(members, *columns, strict=True)}
    judged, levels, prompts = [], [], []
    for kind, slots, rule, ratios in tests:
        less, more = corrected[kind, slots, rule]
        verdict = "scoring is worth more" if less < 1 - LEVEL else "chance holds" if more < 1 - LEVEL else "open"
        if len(ratios) < FIRST:
            verdict = f"none before {FIRST} texts"
        cell = cells[kind, slots]
        gain = shown(paired(cell[rule, PROMPT], cell["redrawn", PROMPT]))
        judged.append((kind, str(slots), f"`{rule}`", str(len(ratios)), shown(ratios), verdict, gain))
    for (kind, slots), cell in sorted(cells.items()):
        both = [shown(paired(cell[rule, SINKS], cell[rule, PROMPT])) for rule in RULES]
        recency = shown(paired(cell["recency", PROMPT], cell["redrawn", PROMPT]))
        prompts.append((kind, str(slots), recency, *both))
        means = [np.exp(list(late[kind, slots][rule, PROMPT].values())) for rule in (*RULES, "more")]
        levels.append((kind, str(slots), *(f"{kls.mean():.3g}" if len(kls) >= SHOWN else "-" for kls in means)))
    rules = [f"`{rule}`" for rule in RULES]
    head = ("kind", "slots", "rule", "texts", "D against redrawn at 1.25 K", "verdict")
    head += ("after its own first eviction, against redrawn at K",)
    parts = [
        ("Scoring against chance, prompt kept (`/1`: an eviction after every token):", head, judged),
        (
            "Mean D over the tokens of that margin, nats per token, prompt kept:",
            ("kind", "slots", *rules, "redrawn at 1.25 K"),
            filled(levels),
        ),
        ("What `recency` loses against `redrawn`:", ("kind", "slots", "recency"), filled([row[:3] for row in prompts])),
        (
            "What each rule loses where only four tokens of the prompt are kept:",
            ("kind", "slots", *rules),
            filled([row[:2] + row[3:] for row in prompts]),
        ),
        (
            "Codes: how much likelier the full cache finds them, nats per token, by blocks since they were said:",
            ("slots", "rule", *map(str, AGES)),
            codes_of([row for row in rows if row["kind"] == "codes"]),
        ),
    ]
    return "\n\n".join(f"{title}\n\n{markdown(names, *lines)}" for title, names, lines in parts if lines)


def filled(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows of a table that have a number behind kind and slots."""
    return [row for row in rows if set(row[2:]) != {"-"}]


def codes_of(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Lines of the table of codes: (slots, rule, mean loss at each of AGES)."""
    losses: dict[tuple[int, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for age, nll in row["codes"].items():
            losses[row["slots"], row["rule"]][age].append(nll - row["full_codes"][age])
    return [
        (str(slots), f"`{rule}`", *(f"{mean(ages[str(age)]):+.2f}" if ages[str(age)] else "-" for age in AGES))
        for (slots, rule), ages in sorted(losses.items())
    ]


def two_tails(ratios: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float]:
    """p of a mean of 0 or more, and of 0 or less; NaN for fewer than FIRST texts, which get no verdict."""
    if len(ratios) < FIRST:
        return math.nan, math.nan
    t = float(ratios.mean() / max(ratios.std(ddof=1) / math.sqrt(len(ratios)), 1e-12))
    tail = t_tail(abs(t), len(ratios) - 1) / 2
    return (tail, 1 - tail) if t < 0 else (1 - tail, tail)


def shown(ratios: np.ndarray[Any, np.dtype[np.float64]]) -> str:
    """Mean and 95 % interval of log ratios, as percent of KL; - of fewer than SHOWN texts."""
    if len(ratios) < SHOWN:
        return "-"
    return "{:+.1f} % [{:+.1f}, {:+.1f}]".format(*percent(ratios))


def percent(ratios: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float, float]:
    """Mean of log ratios as percent of KL, and its 95 % t-interval, low and high."""
    half = t_quantile(1 - (1 - LEVEL) / 2, len(ratios) - 1) * float(ratios.std(ddof=1)) / math.sqrt(len(ratios))
    middle, low, high = (100 * math.expm1(float(ratios.mean()) + x) for x in (0.0, -half, half))
    return middle, low, high


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m experiments.studies.decoding",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parts = result.add_subparsers(required=True)
    for command, about in ((run, "feed texts"), (size, "how many texts are needed"), (report, "the tables")):
        sub = parts.add_parser(command.__name__, help=about, allow_abbrev=False)
        sub.add_argument("folder", metavar="FOLDER")
        sub.set_defaults(command=command)
        if command is report:
            sub.add_argument("--page", type=Path, help="write the tables into this page")
        if command is run:
            sub.add_argument("--model", default="smollm2_135m", metavar="NAME")
            sub.add_argument("--texts", type=int, default=FIRST, metavar="N", help=f"of each kind (default {FIRST})")
            sub.add_argument("--start", type=int, default=0, metavar="N", help="the first text (default 0)")
            sub.add_argument("--kinds", nargs="+", default=list(REDUCED), choices=list(KINDS))
            sub.add_argument("--shares", nargs="+", type=int, default=list(SHARES), choices=SHARES, help="1/S budgets")
            sub.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
            sub.add_argument("--kept", nargs="+", default=[PROMPT, SINKS], choices=(PROMPT, SINKS))
            sub.add_argument("--every", type=int, default=STEP, metavar="N", help="tokens between evictions")
            sub.add_argument("--together", type=int, default=TOGETHER, metavar="N", help="texts a forward (--every 1)")
            sub.add_argument("--tokens", type=int, default=TOKENS, metavar="N", help=f"of a text (default {TOKENS})")
            sub.add_argument("--shard", default="0/1", metavar="i/n", help="the i-th of n parts, from 0")
            sub.add_argument("--dry-run", action="store_true", help="say what would be computed, and hours")
    return result


def main(words: Sequence[str] | None = None) -> int:
    """0, or 2 for what cannot be done, which is printed."""
    return carried_out(parser(), words)


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
