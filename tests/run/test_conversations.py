"""Conversations: the answers stay, age and are evicted; each turn is held against a loop that feeds token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from commands import admit_in_test
from test_bounded_prefill import settings
from test_chat_template import CHATML

from kvexp.core import Budget, CacheConfig
from kvexp.diagnose.case import fed_prompt
from kvexp.generate.prefill import forward_last
from kvexp.hf import EvictionCache
from kvexp.hf.load import byte_tokenizer
from kvexp.methods import H2O
from kvexp.results.blocks import print_blocks
from kvexp.results.read import read_runs
from kvexp.results.views import VIEWS, shown
from kvexp.run import answers
from kvexp.run.answers import conversation_outputs
from kvexp.run.batches import evaluate_run
from kvexp.run.model_spec import load
from kvexp.run.prompts import batches, prompt_of, tokenize, turn_ids
from kvexp.run.settings import Settings
from kvexp.run.store import runs
from kvexp.tasks import Dialogue, Example, SodaTurns
from kvexp.tasks.articles import articles
from kvexp.tasks.base import Turn
from kvexp.tasks.dialogues import DialogueTask
from kvexp.util.errors import ConfigError
from kvexp.util.output import Console

TURNS = (
    Turn("A heron stood in the reeds by the mill and did not move all day. Where?", "by the mill", 0),
    Turn("And who saw it?", "the miller", 1),
    Turn("For how long?", "all day", 2),
)


@dataclass(frozen=True, kw_only=True)
class ShortDialogue(DialogueTask):
    """One conversation of three turns, twice."""

    name: ClassVar[str] = "short_dialogue"
    generated: ClassVar[bool] = True
    metrics: ClassVar[tuple[str, ...]] = ("letters",)
    max_new_tokens: int = 7

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from ((f"turn {n}", {"turn": n, "again": again}) for again in (0, 1) for n in range(len(TURNS)))

    def example(self, row: dict[str, Any], where: str) -> Example:
        first = replace(TURNS[0], message=f"{'Again. ' * row['again']}{TURNS[0].message}")
        turns, number = (first, *TURNS[1:]), row["turn"]
        info = {"turn": number, "distance": turns[number].distance}
        return Example(f"talk {row['again']} turn {number}", first.message, turns[number].reference, number=number,
                       turns=turns, info=info)  # fmt: skip

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        return {"letters": float(len(output))}

    def fingerprint(self) -> str:
        return "short"


@pytest.fixture(autouse=True)
def named(monkeypatch):
    admit_in_test(monkeypatch, ShortDialogue)


def talk(outputs: Any, *words: str, history: str = "own") -> Settings:
    made = settings(outputs, "model=tiny", "task=sample", "task.max_new_tokens=7", *words)
    task = ShortDialogue(history=history)
    return replace(made, task=task).identified({**made.labels, "task": task.name})


def answers_of(one: Settings) -> tuple[Any, Any, list[Any]]:
    """The model, its tokenizer and the outputs of one conversation's turns."""
    model, tokenizer = load(one.model)
    batch = [(i, prompt_of(one, model, tokenizer, example)) for i, example in enumerate(one.task.examples())]
    made = dict(pair for some in conversation_outputs(one, model, tokenizer, batch) for pair in some.items())
    assert sorted(made) == list(range(6))
    return model, tokenizer, [made[i] for i in range(3)]


class ByHand:
    """A cache that is fed the conversation in forwards of one token, behind its first message."""

    def __init__(self, model: Any, tokenizer: Any, config: CacheConfig, ahead: int) -> None:
        self.ids = tokenizer(TURNS[0].message).input_ids
        self.cache = EvictionCache(model, config, prompt_tokens=len(self.ids), max_new_tokens=ahead)
        self.model = model
        self.logits = self._feed(self.ids)

    def _feed(self, tokens: list[int]) -> torch.Tensor:
        seen = self.cache.get_seq_length() + len(tokens)
        with torch.no_grad():
            return forward_last(self.model, torch.tensor([tokens]), torch.ones(1, seen, dtype=torch.int64), self.cache)

    def read(self, tokens: list[int]) -> list[torch.Tensor]:
        """Distributions before each token, which is then fed; the last token is fed too."""
        found = []
        for token in tokens:
            found.append(self.logits[0].float().log_softmax(-1))
            self.logits = self._feed([token])
        return found


def test_a_conversation_is_written_before_the_next_is_held(tmp_path, monkeypatch):
    """Two in one batch: an interrupt within the second leaves the rows of the first."""
    held, hold = [], answers._Conversation.hold

    def interrupted(talk: Any) -> Any:
        held.append(1)
        if len(held) == 2:
            raise KeyboardInterrupt
        return hold(talk)

    one = talk(tmp_path, "method=full", "batch_size=6")
    with monkeypatch.context() as patch:
        patch.setattr(answers._Conversation, "hold", interrupted)
        with pytest.raises(KeyboardInterrupt):
            evaluate_run(one)
    (run,) = runs(tmp_path)
    assert [row["index"] for row in run.rows()] == [0, 1, 2]
    assert [row["index"] for row in evaluate_run(one).rows()] == list(range(6))


@pytest.mark.parametrize("history", ["own", "full", "reference"])
def test_every_turn_is_a_loops_that_feeds_token_by_token(tmp_path: Any, history: str) -> None:
    one = talk(tmp_path, "method=h2o", "kv_ratio=0.4", history=history)
    model, tokenizer, answers = answers_of(one)
    _, _, of_full = answers_of(talk(tmp_path, "method=full", history=history))
    asked = [[]] + [tokenizer(f"\n\n{turn.message}\n", add_special_tokens=False).input_ids for turn in TURNS[1:]]
    ahead = sum(map(len, asked)) + sum(max(7, len(turn.reference)) + 1 for turn in TURNS)
    own = ByHand(model, tokenizer, one.cache, ahead)
    full = ByHand(model, tokenizer, one.baseline().cache, ahead)
    for number, (turn, answer) in enumerate(zip(TURNS, answers, strict=True)):
        for side in (own, full):
            side.read(asked[number])
        stays = {
            "own": answer.tokens,
            "full": of_full[number].tokens,
            "reference": tokenizer(turn.reference, add_special_tokens=False).input_ids,
        }[history]
        greedy = int(own.logits[0].argmax())
        assert greedy == answer.tokens[0], number
        pairs = list(zip(own.read(stays), full.read(stays), strict=True))
        kl = [float((b.exp() * (b - a)).sum()) for a, b in pairs]
        if history == "own":
            assert [int(a.argmax()) for a, _ in pairs] == answer.tokens
        if history != "reference":
            assert of_full[number].info == {"fed": answer.info["fed"]}
        skip = 1 if number == 0 else 0  # predicted by the whole prefill
        assert answer.info["kl"] == pytest.approx(sum(kl[skip:]) / len(kl[skip:]), rel=1e-3, abs=1e-6)
        assert answer.info["kl_tokens"] == len(kl) - skip
        assert answer.receipt["first_eviction_step"] == 0
    if history == "full":
        assert [answer.tokens for answer in answers] != [answer.tokens for answer in of_full]


def test_with_room_for_all_a_conversation_is_the_full_caches(tmp_path: Any) -> None:
    roomy = replace(talk(tmp_path, "method=h2o"), cache=CacheConfig(H2O(), Budget(tokens=400)))
    _, _, answers = answers_of(roomy)
    _, _, of_full = answers_of(talk(tmp_path, "method=full"))
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in of_full]
    assert all(answer.info["kl"] < 1e-5 and answer.info["top1"] == 1 for answer in answers)


def test_an_end_token_is_fed_once_and_the_template_parts_the_turns() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    example = next(iter(ShortDialogue().examples()))
    prompt = tokenize(example, ShortDialogue(), tokenizer, 1 << 40, chat=True)
    text = tokenizer.decode(turn_ids(prompt, tokenizer, "Next?", chat=True))
    assert text == "<|im_end|>\n<|im_start|>user\nNext?<|im_end|>\n<|im_start|>assistant\n"
    plain = tokenize(example, ShortDialogue(), tokenizer, 1 << 40, chat=False)
    assert tokenizer.decode(turn_ids(plain, tokenizer, "Next?", chat=False)) == "\n\nNext?\n"


def test_turns_of_a_conversation_are_one_batch_whatever_its_size() -> None:
    each = list(enumerate(ShortDialogue().examples()))
    assert [[i for i, _ in batch] for batch in batches(each, 1, 8)] == [[0, 1, 2], [3, 4, 5]]
    assert [[i for i, _ in batch] for batch in batches(each, 2, 8)] == [[0, 1, 2], [3, 4, 5]]


def test_rows_and_the_table_by_turn_and_by_distance(tmp_path: Any, monkeypatch: Any) -> None:
    run = evaluate_run(talk(tmp_path, "method=h2o", "kv_ratio=0.4"))
    rows = run.rows()
    assert [row["info"]["turn"] for row in rows] == [0, 1, 2] * 2
    assert {row["seconds"]["ttft"] for row in rows} == {None} and rows[0]["seconds"]["tpot"] > 0
    frame, blocks, below = shown(read_runs(tmp_path), "turns")
    assert list(frame["turn"]) == [0, 1, 2] and set(frame["n"]) == {2} and set(frame["history"]) == {"own"}
    for turn in range(3):
        mine = [row for row in rows if row["info"]["turn"] == turn]
        tokens = sum(row["info"]["kl_tokens"] for row in mine)
        kl = sum(row["info"]["kl"] * row["info"]["kl_tokens"] for row in mine) / tokens
        assert frame["kl"][turn] == pytest.approx(kl) and frame["kl_tokens"][turn] == tokens
        assert frame["score"][turn] == pytest.approx(sum(row["metrics"]["letters"] for row in mine) / 2)
    assert list(VIEWS["distance"].table(read_runs(tmp_path))["distance"]) == [0, 1, 2]
    console = Console(markup=False, width=200, record=True)
    print_blocks(blocks, below, console)
    assert "letters by turn, its own answers stay" in console.export_text()


def test_dialogues_ask_for_what_was_told() -> None:
    each = list(Dialogue().examples())
    assert len(each) == 7 * len(articles()) and each[7].prompt != each[0].prompt
    for example in each:
        told = example.number - example.info["distance"]
        assert example.reference in example.turns[told].message
        assert example.prompt == example.turns[0].message
        uses = sum(example.reference in turn.message for turn in example.turns[: example.number + 1])
        assert uses == 1, example.id
    assert [example.info["distance"] for example in each[:7]] == [0, 1, 2, 1, 4, 4, 6]


def test_soda_turn_by_turn(tmp_path: Any) -> None:
    import json

    row = {
        "narrative": "Two friends meet.", "speakers": ["Ann", "Bo", "Ann"], "original_index": 3,
        "dialogue": ["Hi Bo.", "Hi Ann.", "Tea?", "Yes.", "Good."],
    }  # fmt: skip
    (tmp_path / "soda.jsonl").write_text(json.dumps(row) + "\n")
    each = list(SodaTurns(data_files=str(tmp_path / "soda.jsonl")).examples())
    assert [(one.id, one.reference) for one in each] == [("3 turn 0", "Hi Ann."), ("3 turn 1", "Yes.")]
    assert each[0].prompt.endswith("Answer Ann in one or two sentences.\n\nHi Bo.")
    assert [turn.message for turn in each[1].turns[1:]] == ["Tea?"] and each[1].prompt == each[0].prompt
    # What was sent before a later turn's answer: all messages, with a mark where the answers stood.
    words = ("task=soda_turns", f"task.data_files={tmp_path / 'soda.jsonl'}", "task.max_new_tokens=4")
    run = evaluate_run(settings(tmp_path / "outputs", "model=tiny", "method=h2o", "kv_ratio=0.4", *words))
    (first, _), (later, summary) = (fed_prompt(run, row) for row in run.rows())
    assert later == f"{first}[answer]\n\nTea?\n" and "then 1 answer, not printed" in summary


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("generation=beam4",), "set generation=greedy"),
        (("budget.of=sequence",), "set budget.of=prompt"),
        (("divergence=only",), "rows of task=dialogue say how far"),
        (("questions=all",), "questions=all is for tasks with several questions"),
    ],
)
def test_settings_that_end_a_conversation_are_refused(tmp_path: Any, words: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        settings(tmp_path, "model=tiny", "task=dialogue", *words)
    assert message in str(error.value)


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"task\.history must be one of own, full, reference, got 'true'"):
        Dialogue(history="true").check_options()
    with pytest.raises(ConfigError, match=r"task\.truncate must be skip for dialogue"):
        Dialogue(truncate="middle").check_options()
    with pytest.raises(ConfigError, match="must be first for dialogue"):
        Dialogue(sample="shuffled", limit=3).check_options()


def test_a_conversation_that_does_not_fit_is_skipped() -> None:
    task = ShortDialogue()
    each = list(task.examples())
    need = [sum(len(t.message) + max(7, len(t.reference)) + 1 for t in example.turns[: example.number + 1])
            for example in each]  # fmt: skip
    fitted = [task.fit(example, len, need[1]) for example in each[:3]]
    assert [one.skipped for one in fitted] == ["", "", "too long with its turns"]


def test_conversations_that_begin_alike_stay_apart(tmp_path: Any) -> None:
    one = talk(tmp_path, "method=h2o", "kv_ratio=0.5")
    model, tokenizer = load(one.model)
    other = (*TURNS[:2], replace(TURNS[2], message="For how many years, and why there of all places?"))
    talks = {"a": TURNS, "b": other, "b again": other}
    batch = []
    for name, turns in talks.items():
        for number, turn in enumerate(turns):
            example = Example(f"{name} {number}", turns[0].message, turn.reference, number=number, turns=turns)
            batch.append((len(batch), prompt_of(one, model, tokenizer, example)))
    made = dict(pair for some in conversation_outputs(one, model, tokenizer, batch) for pair in some.items())
    assert sorted(made) == list(range(9))  # a row of each turn of each
    fed = [made[place].info["fed"] for place in range(9)]
    assert fed[:2] == fed[3:5] and fed[2] < fed[5] and fed[3:6] == fed[6:]
    assert [made[place].tokens for place in (3, 4, 5)] == [made[place].tokens for place in (6, 7, 8)]
