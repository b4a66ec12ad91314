"""IFEval: instructions that code checks, by lm-eval's copy of the official checkers, alone or behind own articles."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, ClassVar

from kvexp.tasks.articles import articles, articles_digest
from kvexp.tasks.base import Example, Positive, QuestionTask, Task, Truncation, When, row_id
from kvexp.tasks.data import misshapen, text
from kvexp.tasks.lm_eval import drawing_by, mend, quiet, require
from kvexp.util.errors import ConfigError

STRICT, LOOSE = "strict", "loose"


@cache
def checkers() -> ModuleType:
    """lm-eval's module of the checkers, its guesses of languages made repeatable; ConfigError that says what to do."""
    require()
    try:
        import nltk

        nltk.data.find("tokenizers/punkt_tab")  # else lm-eval would try to download it
        with quiet():
            import langdetect
            from lm_eval.tasks.ifeval import utils
    except (ImportError, LookupError) as error:
        reason = next(iter(str(error).strip(" *\n").splitlines()), "")
        raise ConfigError(f"IFEval's checkers cannot be loaded ({reason}). {mend(error)}") from error
    langdetect.DetectorFactory.seed = 0
    module: ModuleType = utils
    return module


def followed(asked: Mapping[str, Any], answer: str) -> dict[str, list[bool]]:
    """Whether an answer follows each instruction: strict, as it stands; loose, in any of eight variants without its
    first line, its last line and asterisks. asked: key, prompt, instruction_id_list and kwargs of a row.

    An option that a checker draws (`check_options_of`) is drawn by the row: the same for strict, loose and any answer.
    """
    module = checkers()
    entry = module.InputExample(**{name: asked[name] for name in ("key", "instruction_id_list", "prompt", "kwargs")})
    graders = {STRICT: module.test_instruction_following_strict, LOOSE: module.test_instruction_following_loose}
    grades: dict[str, list[bool]] = {}
    for name, grader in graders.items():
        with drawing_by(zlib.crc32(f"{asked['key']} {asked['prompt']}".encode())):
            grades[name] = [bool(passed) for passed in grader(entry, answer).follow_instruction_list]
    return grades


def check_options_of(kind: str, options: Mapping[str, Any], where: str) -> None:
    """ConfigError where the checker of an instruction cannot take its options, or would draw one at random.

    It draws what is missing, null, 0, empty or out of range. One draw is official: of a letter in place of another
    character, as of the # and ! of two rows.
    """
    checker = checkers().instructions_registry.INSTRUCTION_DICT[kind](kind)
    given = {name: value for name, value in options.items() if value}  # as lm-eval gives them
    with drawing_by(0):
        before = random.getstate()
        try:
            checker.build_description(**given)
            draws = random.getstate() != before
            checker.check_following("A word. Another.")
            if isinstance(words := given.get("keywords", given.get("forbidden_words", [])), str) or "" in words:
                raise ValueError("a list of words, none of them empty")  # else each letter would be a word
        except Exception as error:  # of whatever an option of a wrong type or name leads to
            raise ConfigError(f"{where}: field 'kwargs' has what {kind} cannot take: {options} ({error})") from error
    names = checker.get_instruction_args_keys()
    if draws and not (set(names) <= set(given) and draws_letter(options)):
        raise ConfigError(
            f"{where}: field 'kwargs' must give {kind} its options ({', '.join(names)}), none of them 0 or empty, got "
            f"{options}: lm-eval's checker would draw the rest at random"
        )


def draws_letter(options: Mapping[str, Any]) -> bool:
    """Whether the options of an instruction name a character to count that is no letter, so that a letter is drawn."""
    letter = options.get("letter")
    return isinstance(letter, str) and len(letter) == 1 and not (letter.isascii() and letter.isalpha())


@dataclass(frozen=True, kw_only=True)
class IFEval(Task):
    """Follow instructions that code can check; rows {key, prompt, instruction_id_list, kwargs}, 541 (Zhou et al.,
    arXiv:2311.07911).

    Metrics in percent: prompt_strict (all instructions followed), instruction_strict (share of them), and both loose.
    The published numbers by instruction weigh every instruction alike, so a row keeps its list (info.strict,
    info.loose). The prompt is one user turn. It has some 60 tokens: what is evicted is the answer.
    """

    name: ClassVar[str] = "ifeval"
    metrics: ClassVar[tuple[str, ...]] = ("prompt_strict", "instruction_strict", "prompt_loose", "instruction_loose")
    uncut: ClassVar[str] = "an instruction cut short is another one"

    hub_id: str = "google/IFEval"
    revision: str | None = "966cd89545d6b6acfd7638bc708b98261ca58e84"
    split: str = "train"
    max_new_tokens: Positive = 1280
    truncate: Truncation = "skip"

    def example(self, row: dict[str, Any], where: str) -> Example:
        instructions = asked_of(row, where)
        return Example(str(instructions["key"]), instructions["prompt"], json.dumps(instructions, ensure_ascii=False))

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        grades = followed(json.loads(reference), output)
        scores = {f"prompt_{name}": 100.0 * all(passed) for name, passed in grades.items()}
        scores |= {f"instruction_{name}": 100.0 * sum(passed) / len(passed) for name, passed in grades.items()}
        return {name: scores[name] for name in self.metrics}

    def of_answer(self, output: str, reference: str, finish_reason: str | None = None) -> dict[str, Any]:
        return dict(followed(json.loads(reference), output))

    def corrected(self) -> tuple[str, ...]:
        """The letter that a checker draws, which was another one for every grade, where a row has one."""
        return ("letter_draws",) if self.any_row(lambda row: any(map(draws_letter, row["kwargs"]))) else ()

    def check(self) -> None:
        checkers()
        super().check()


def asked_of(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """key, prompt, instruction_id_list and kwargs of a row, options that are null left out; ConfigError otherwise."""
    prompt, kinds, options = (
        text(dict(row), "prompt", where, "data_files"),
        row.get("instruction_id_list"),
        row.get("kwargs"),
    )
    if not isinstance(kinds, list) or not kinds or not all(isinstance(kind, str) for kind in kinds):
        raise misshapen(row, "instruction_id_list", where, "a list of names of instructions")
    if (
        not isinstance(options, list)
        or len(options) != len(kinds)
        or not all(isinstance(entry, Mapping | None) for entry in options)
    ):
        raise misshapen(row, "kwargs", where, "a list of objects, one for each of instruction_id_list")
    known = checkers().instructions_registry.INSTRUCTION_DICT
    if unknown := [kind for kind in kinds if kind not in known]:
        raise ConfigError(f"{where}: lm-eval has no checker of {', '.join(unknown)}; it has {', '.join(known)}")
    given = [{name: value for name, value in (entry or {}).items() if value is not None} for entry in options]
    for kind, of_kind in zip(kinds, given, strict=True):
        check_options_of(kind, of_kind, where)
    return {
        "key": row_id(dict(row), "key", prompt),
        "prompt": prompt,
        "instruction_id_list": kinds,
        "kwargs": given,
    }


@dataclass(frozen=True, kw_only=True)
class IFEvalArticles(IFEval, QuestionTask):
    """IFEval's prompts behind kvexp's own articles, which are to be read first: no benchmark of anybody else's.

    A prompt of 60 tokens leaves nothing to evict before the answer. Here `articles` of the 36, chosen by the row's key,
    stand in front. With question=after_eviction, the default, they are evicted before the prompt is known; with
    in_prompt the prompt is evicted with them.
    """

    name: ClassVar[str] = "ifeval_articles"

    question: When = "after_eviction"
    articles: Positive = 2
    before: str = "Read the following news articles, then follow the instructions behind them.\n\n"

    def example(self, row: dict[str, Any], where: str) -> Example:
        plain, all_of_them = super().example(row, where), articles()
        first = zlib.crc32(plain.id.encode())
        chosen = [all_of_them[(first + place) % len(all_of_them)].text for place in range(self.articles)]
        return self.ask(plain.id, (self.before, "\n\n".join(chosen), ""), f"\n\n{plain.prompt}", plain.reference)

    def fingerprint(self) -> str:
        return f"{super().fingerprint()} articles:{articles_digest()}"
