"""The testbed's examples as data of lm-eval, LongBench and needle in a haystack, to run their own code on them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from kvexp.errors import ConfigError
from kvexp.tasks.testbed.choice import TestbedChoice
from kvexp.tasks.testbed.qa import TestbedQA
from kvexp.testbed.document import Fact, draw_fact, filler_for
from kvexp.testbed.forms import ask, opening
from kvexp.testbed.words import NAMES

NEEDLES, TEXTS, TEXT_TOKENS, OTHERS = 3, 12, 100, 2  # needles; texts in the haystack, their tokens and other facts
_PLAIN = re.compile(r"[\w./-]+")


def export(folder: Path, size: int = 60, split: str = "test", seed: int = 12345) -> dict[str, list[str]]:
    """Write the files; which part of kvexp reads them -> overrides of run.py that do.

    lm_eval/: testbed_choice as an lm-eval task of `size` items (context, question and choices are those of
    task=testbed_choice, number by number); longbench/: `size` questions of task=testbed_qa as rows of triviaqa, the
    LongBench data set whose prompt ends where the question does (its instruction is unknown words to the models);
    haystack/: texts with other facts strewn in, and a few codes to hide among them.
    """
    common: dict[str, Any] = {"size": size, "split": split, "seed": seed}
    choice, qa = TestbedChoice(marked=4, **common), TestbedQA(marked=4, **common)
    for task in (choice, qa):
        task.check_options()
    try:
        return {
            "lm_eval": _lm_eval(_made(folder / "lm_eval"), choice),
            "longbench": _longbench(_made(folder / "longbench"), qa),
            "needle": _needle(_made(folder / "haystack"), Random(f"haystack {split} {seed}"), split),
        }
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error}") from error


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def _lm_eval(folder: Path, task: TestbedChoice) -> list[str]:
    """A task definition of lm-eval and its rows. What follows the text goes to the model behind one space."""
    rows = [
        {
            "id": example.id,
            "prompt": example.prompt,
            "choices": [choice.strip() for choice in example.choices],
            "answer": [choice.strip() for choice in example.choices].index(example.reference),
        }
        for example in task.examples()
    ]
    data, path = folder / "testbed_choice.test.jsonl", folder / "testbed_choice.yaml"
    _write(data, rows)
    metrics = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
    definition = {
        "task": "testbed_choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": metrics,
    }
    path.write_text(json.dumps(definition, indent=1) + "\n", encoding="utf-8")  # JSON is YAML
    return ["task=lm_eval", f"task.tasks=[{_quoted(str(path))}]"]


def _longbench(folder: Path, task: TestbedQA) -> list[str]:
    rows = []
    for example in task.examples():
        context, _, question = example.prompt.rpartition(" ask ")
        row: dict[str, Any] = {"input": f"ask {question}", "context": context, "answers": [example.reference]}
        row |= {"length": len(context.split()), "dataset": "triviaqa", "language": "en", "all_classes": None}
        rows.append({**row, "_id": example.id})
    _write(folder / "triviaqa.jsonl", rows)
    return ["task=longbench", "task.subset=triviaqa", f"task.data_files={_quoted(str(folder))}"]


def _needle(folder: Path, rng: Random, split: str) -> list[str]:
    taken: set[tuple[str, str]] = set()
    hidden = _codes(rng, split)
    for number in range(TEXTS):
        sentences = [_other(rng, split, taken).sentence() for _ in range(OTHERS)]
        sentences += filler_for(rng, TEXT_TOKENS - sum(len(sentence.split()) for sentence in sentences))
        rng.shuffle(sentences)
        (folder / f"{number:02}.txt").write_text(" ".join(sentences) + "\n", encoding="utf-8")
    lists = {
        "needles": [fact.sentence() for fact in hidden],
        "questions": [ask(fact).strip() for fact in hidden],
        "answers": [fact.value for fact in hidden],
    }
    words = ["task=needle", f"task.haystack={_quoted(str(folder))}"]
    words += [f"task.{name}=[{','.join(map(_quoted, texts))}]" for name, texts in lists.items()]
    words += [f"task.before={_quoted(opening(''))}", f"task.after={_quoted(' {question}')}"]
    words += ["task.answer_prefix=''", "task.max_new_tokens=6"]
    return [*words, "task.lengths=[160,320]", "task.depths=[0,10,20,30,40,50]"]


def _codes(rng: Random, split: str) -> list[Fact]:
    """Codes without a digit in common: a model that copies what followed a digit would mix up the others."""
    found: list[Fact] = []
    digits: list[str] = []
    while len(found) < NEEDLES:
        fact = draw_fact(rng, split, set(), NAMES, "code")
        known = {other.name for other in found}
        if fact.name not in known and len({*digits, *fact.value.split()}) == len(digits) + 3:
            found.append(fact)
            digits += fact.value.split()
    return found


def _other(rng: Random, split: str, taken: set[tuple[str, str]]) -> Fact:
    """A fact that is no code: a code of somebody else would be as good an answer."""
    while (fact := draw_fact(rng, split, taken, NAMES, None)).attribute == "code":
        pass
    return fact


def _quoted(text: str) -> str:
    """As one value in Hydra's grammar."""
    return text if _PLAIN.fullmatch(text) else '"' + text.replace('"', '\\"') + '"'


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
