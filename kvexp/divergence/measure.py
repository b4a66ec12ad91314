"""Measure what is missing: an example of a group of runs is prefilled once, and all are forced the same text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from kvexp.config.group_checks import batch_cache
from kvexp.config.model_spec import load
from kvexp.config.settings import Settings
from kvexp.console import Progress
from kvexp.diagnose.runs import examples_of, settings_at
from kvexp.divergence.divergence_file import OWN, append, read
from kvexp.errors import ConfigError
from kvexp.evaluate.evaluate_run import waiting_notice
from kvexp.evaluate.example_prompts import prompt_of
from kvexp.evaluate.limits import partition_by_memory
from kvexp.evaluate.outputs import noise_seed
from kvexp.evaluate.preflight import with_stop_tokens
from kvexp.evaluate.tokenized_examples import TokenizedExample, continuation
from kvexp.models.half_precision import one_row_per_forward
from kvexp.record import Run
from kvexp.tasks import Example, LMEval, Task
from kvexp.terminal import say

Row = dict[str, Any]


@dataclass
class Subject:
    """A run whose divergence is measured: its rows by example, and which (example, text) pairs it has."""

    settings: Settings
    run: Run
    rows: dict[str, Row]
    done: set[tuple[str, str]]


def refusal(settings: Settings) -> str | None:
    """Why a run has no divergence, in the user's words; None if it has one."""
    decoding, task = settings.decoding, settings.task
    if settings.is_baseline:
        return "the full cache is what divergence is measured from"
    if decoding.num_beams > 1:
        return "beams take over one another's caches: there is no one path to compare (generation=greedy)"
    if decoding.sample:
        return "sampled answers differ by chance: divergence follows the greedy answer (generation=greedy)"
    if decoding.prefill_chunk is not None:
        return "prompts are prefilled in chunks, which runs cannot share (generation.prefill_chunk=null)"
    if isinstance(task, LMEval):
        return "lm-eval's items are scored under their own protocol: see flips"
    if task.only_nll or type(task).score_choices is not Task.score_choices:
        return f"task={task.name} scores given texts itself"
    if settings.method.modifies_prefill:
        return f"{settings.method.name} changes what the prompt's own tokens attend to: its prefill cannot be shared"
    if one_row_per_forward(settings.model.dtype, settings.model.resolved_device()):
        return "in half precision on a CPU rows of one batch round otherwise than alone (model.dtype=float32)"
    return None


def measure(runs: Sequence[Run], texts: Sequence[str]) -> dict[str, str]:
    """Write the lines that these runs lack; hash -> why a run has none."""
    refused: dict[str, str] = {}
    groups: dict[str, list[Subject]] = defaultdict(list)
    for run in runs:
        if run.baseline is None:
            continue
        try:
            settings = settings_at(run)
        except ConfigError as error:
            refused[run.hash] = str(error)
            continue
        if (why := refusal(settings)) is not None:
            refused[run.hash] = why
            continue
        rows = {row["example"]: row for row in run.rows() if not row.get("skipped")}
        groups[run.baseline].append(Subject(settings, run, rows, set(read(run))))
    for subjects in groups.values():
        _group(subjects, texts)
    return refused


def _group(subjects: list[Subject], texts: Sequence[str]) -> None:
    """Runs of one baseline: they share model, task and prompts."""
    rows = {name: row for each in subjects for name, row in each.rows.items()}
    todo = [row for name, row in rows.items() if any(_lacks(each, name, text) for each in subjects for text in texts)]
    labels = subjects[0].settings.labels
    title = f"divergence of {len(subjects)} runs, {labels['model']}, {labels['task']}"
    if not todo:
        say(f"{title}: {len(rows)} examples are measured already")
        return
    lead = subjects[0].settings
    examples = examples_of(lead, todo)
    model, tokenizer = load(lead.model)
    for each in subjects:
        each.settings = with_stop_tokens(each.settings, model, tokenizer)
    with Progress(title, len(rows), len(rows) - len(todo)) as progress:
        for example in examples:
            prompt = prompt_of(lead, model, tokenizer, example)
            for text in texts:
                lacking = [each for each in subjects if _lacks(each, example.id, text)]
                for part in _parts(lacking, model, example, prompt):
                    _example(part, model, tokenizer, prompt, text, rows[example.id]["index"])
            progress.advance()


def _lacks(subject: Subject, example: str, text: str) -> bool:
    return example in subject.rows and (example, text) not in subject.done


def _parts(
    subjects: Sequence[Subject], model: Any, example: Example, prompt: TokenizedExample
) -> Iterator[list[Subject]]:
    """As many at a time as fit into memory beside the full cache."""
    if not subjects:
        return
    full = subjects[0].settings.baseline()
    batch = [(0, prompt)]
    for part in partition_by_memory([each.settings for each in subjects] + [full], model, batch):
        chosen = [subjects[place] for place in part if place < len(subjects)]
        if chosen:
            yield chosen


def _example(
    subjects: Sequence[Subject], model: Any, tokenizer: Any, prompt: TokenizedExample, text: str, index: int
) -> None:
    """One prompt and one text, all subjects beside the full cache; writes a line for each of them."""
    from kvexp.generate import decode, divergence_from_full, prefill_together
    from kvexp.generate.divergence import read_question
    from kvexp.generate.inputs import eos_ids

    lead = subjects[0].settings
    full = with_stop_tokens(lead.baseline(), model, tokenizer)
    settings = [full, *(each.settings for each in subjects)]
    new = lead.decoding.max_new_tokens
    seed = noise_seed(lead, prompt.example, asked=bool(prompt.question))
    given = None if text == OWN else reference_tokens(prompt, tokenizer, new, chat=lead.model.chat)
    if given == []:
        say(f"example {prompt.example.id} has no reference answer to force")
        return
    first, *others = prefill_together(
        model,
        [prompt.ids],
        [batch_cache(run, [len(prompt.ids)]) for run in settings],
        max_new_tokens=len(prompt.question) + new,
        tokenizer=tokenizer,
        seeds=[seed],
    )
    if prompt.question:
        read_question(model, [first, *others], prompt.question)
    eos = eos_ids(model, full.decoding.eos)
    if given is None and (
        full.decoding.stop_strings or full.decoding.min_new_tokens
    ):  # more than a greedy step decides
        (answer,) = decode(model, [first.fork([0])], full.decoding, [seed], tokenizer, start=0.0)
        given = answer.tokens[0]
    texts = None if given is None else [given]
    found = divergence_from_full(model, first, others, texts, max_new_tokens=new, eos=eos)
    for subject, (one,) in zip(subjects, found, strict=True):
        line = {"example": prompt.example.id, "index": index, "text": text, "first_by_prefill": not prompt.question}
        line |= asdict(one) | {"same_top1": [int(same) for same in one.same_top1]}
        append(subject.run, [line])
        subject.done.add((prompt.example.id, text))


def reference_tokens(prompt: TokenizedExample, tokenizer: Any, most: int, *, chat: bool) -> list[int]:
    """The reference answer's first `most` tokens as they stand behind the prompt."""
    words = prompt.example.reference
    return continuation(prompt, tokenizer, chat=chat, words=words)[:most] if words.strip() else []


def measure_claimed(runs: Iterable[Run], texts: Sequence[str]) -> dict[str, str]:
    """`measure`, holding every run against other processes meanwhile."""
    runs = sorted(runs, key=lambda run: run.hash)  # all processes in one order: none waits for one that waits for it
    with ExitStack() as held:
        for run in runs:
            held.enter_context(run.claim(waiting=waiting_notice(run), part="divergence"))
        return measure(runs, texts)
