"""The search for a budget: what it finds and saves on known losses, and the command on a small trained model."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvexp.results import advise_search
from kvexp.results.advise import Asked, Candidate, judged, main
from kvexp.results.advise_search import METHODS, Arm, Bracket, Search, target_bytes
from kvexp.run.compose import options
from kvexp.run.store import Run, runs
from kvexp.util import ConfigError

BUDGETS = (0.9, 0.7, 0.5, 0.3)


class Known(Search):
    """A search whose runs are rows of a table: (method, place of the budget) -> losses of all prompts."""

    def __init__(self, asked, losses):
        self.asked, self.losses = asked, losses
        names = dict.fromkeys(name for name, _ in losses)
        self.arms = [Arm.of(name, BUDGETS) for name in names]
        self.examples = [str(i) for i in range(len(next(iter(losses.values()))))]
        self.seen, self.hashes = {}, {}

    def name(self, arm, at):
        return f"{arm.name} {at}"

    def run(self, wanted, shard):
        part, of = map(int, shard.split("/"))
        n = len(self.examples)
        for arm, at in wanted:
            self.seen.setdefault((arm.name, at), set()).update(range(n * part // of, n * (part + 1) // of))

    def candidates(self):
        return {
            (name, at): Candidate(
                *(name, str(at), BUDGETS[at], {str(i): self.losses[name, at][i] for i in sorted(seen)}, f"{name} {at}")
            )
            for (name, at), seen in self.seen.items()
        }

    @property
    def texts(self):
        return sum(map(len, self.seen.values()))

    def advice(self):
        chains = self.choose()
        seen = {int(each) for each in self.choosing}
        assert all(each <= seen for each in self.seen.values()), "what promises is not looked at while choosing"
        self.test(chains)
        return judged(list(self.candidates().values()), self.choosing, self.promising, self.asked, chains)


def law(rng, scales, n=80):
    """Exponential losses by method and budget, larger with less of the cache, as hard for all methods."""
    shared = rng.exponential(1, n)
    return {
        (name, at): scale * (1 - ratio) * shared for name, scale in scales.items() for at, ratio in enumerate(BUDGETS)
    }


def test_it_finds_what_the_whole_grid_finds_with_a_part_of_the_texts():
    scales = {f"m{i}": 0.02 * 1.5**i for i in range(8)}
    same = shares = 0
    for seed in range(20):
        losses = law(np.random.default_rng(seed), scales)
        search = Known(Asked(finalists=1), losses)
        found = search.advice()
        whole = [
            Candidate(
                name, str(at), BUDGETS[at], dict(zip(search.examples, each.tolist(), strict=True)), f"{name} {at}"
            )
            for (name, at), each in losses.items()
        ]
        best = judged(whole, search.choosing, search.promising, search.asked)
        same += found.answers[0] is not None and found.answers[0].candidate.name == best.answers[0].candidate.name
        shares += search.texts / (len(losses) * 80) / 20
    assert same >= 18
    assert shares < 0.5


def test_its_promises_are_not_wrong_too_often():
    """Every budget of every method is just short of the share, and the search picks the luckiest."""
    asked = Asked(confidence=0.9, share=0.8)
    wrong = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        losses = {(f"m{i}", at): 1.0 * (rng.random(80) > 0.795) for i in range(8) for at in range(len(BUDGETS))}
        wrong += any(each is not None for each in Known(asked, losses).advice().answers)
    assert wrong / 300 <= 0.1 + 2 * np.sqrt(0.1 * 0.9 / 300)


def test_it_stops_when_the_answer_cannot_change():
    """Each chain's dearest budget loses a prompt of the first part that promises: nothing is tested after that part."""
    losses = {("m", at): np.zeros(80) for at in range(len(BUDGETS))}
    for each in losses.values():
        each[45] = 1.0
    search = Known(Asked(), losses)
    advice = search.advice()
    assert advice.answers == [None]
    assert max(i for seen in search.seen.values() for i in seen) == 49, (
        "80 prompts in eight parts: 40 to 49 are the fifth"
    )
    (row,) = [chain[0] for chain in advice.chains]
    assert (row.beyond, row.n) == (1, 10)


def test_none_is_worth_a_test():
    search = Known(Asked(), {("m", at): np.ones(80) for at in range(len(BUDGETS))})
    advice = search.advice()
    assert (advice.chains, advice.answers) == ([], [])
    assert max(i for seen in search.seen.values() for i in seen) < 40


def test_a_bracket_closes_on_the_cheapest_budget_that_is_fine():
    for size in (1, 2, 3, 8):
        for cheapest in range(-1, size):
            bracket, tried = Bracket(-1, size), 0
            while (at := bracket.next) is not None:
                bracket.learn(at, at <= cheapest)
                tried += 1
            assert bracket.fine == cheapest
            assert tried <= np.ceil(np.log2(size + 1))


def test_arms_are_options():
    assert set(METHODS) - {"full_quantised"} <= set(options("method"))
    arm = Arm.of("h2o+cache.bits=4", (0.2, 0.9))
    assert (arm.words, arm.budgets) == (("method=h2o", "cache.bits=4"), ("kv_ratio=0.9", "kv_ratio=0.2"))
    with pytest.raises(ConfigError, match="methods: the full cache is what the others are compared with"):
        Arm.of("full", (0.5,))


# The command, on a model of random weights.


@pytest.fixture
def prompts(tmp_path):
    rows = [
        {"prompt": f"Once upon a time there was dog number {i} " + "who ran and ran. " * (3 + i % 4)} for i in range(16)
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def words(prompts, *more):
    own = ["kl=50", "share=0.6", "confidence=0.8", "methods=window,h2o", "budgets=0.9,0.5"]
    rest = ["model=tiny", "task.max_new_tokens=4", f"outputs_dir={prompts.parent / 'outputs'}"]
    return [f"data={prompts}", *own, *rest, *more]


def test_the_command_from_prompts_to_a_promise_and_again(prompts, capsys, monkeypatch):
    outputs = prompts.parent / "outputs"
    assert main(words(prompts, "--dry-run")) == 0
    out = capsys.readouterr().out
    assert "16 prompts: 8 choose; 8 make the promise" in out and "2 methods by 2 prompts" in out
    assert not outputs.exists(), "a dry run leaves nothing"

    kept, seen = advise_search.keep_plan, []

    def looked(place, changes):
        kept(place, changes)
        if "chains" in changes:
            seen.extend(line["index"] for run in runs(outputs) for line in run.divergence().values())

    monkeypatch.setattr(advise_search, "keep_plan", looked)
    assert main(words(prompts)) == 0
    out = capsys.readouterr().out
    assert seen and max(seen) < 8, "the plan is kept before a prompt that promises is run"
    assert "tiny on prompts: 0.6 of new prompts within 50 nats per token of the full cache" in out
    assert "kv_ratio=0.5" in out and "0 of 8" in out

    def files():
        return {path: path.read_bytes() for path in outputs.rglob("*.jsonl")}

    before = files()
    assert main(words(prompts)) == 0
    again = capsys.readouterr().out
    assert files() == before, "the same command finds its rows"
    assert again.splitlines()[-6:] == out.splitlines()[-6:]
    assert (
        main([str(outputs), "kl=50", "share=0.6", "confidence=0.8", "target=llama31_8b_instruct", "context=1000"]) == 0
    )
    from_rows = capsys.readouterr().out
    assert "0 of 8" in from_rows and "62.5 MiB" in from_rows, "half of 1000 tokens of 128 KiB"
    half = next(run for run in runs(outputs) if run.labels.get("kv_ratio") == 0.5)
    # Llama 3.1 8B: 32 layers, 8 heads of 128 channels, keys and values of two bytes: 131072 bytes per token.
    assert target_bytes(Run.load(half.path), "llama31_8b_instruct", 1000) == (501 * 131072, 1001 * 131072)
    assert main([str(outputs), "kl=0.2", "share=0.6", "confidence=0.8", f"new={prompts}"]) == 0
    other = capsys.readouterr().out
    assert "have answered 1 other question(s)" in other and "No shift was found" in other


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["share=0.9"], "16 prompts are too few: half of them chooses, and 8 can promise share=0.818"),
        (["methods=h20"], "h20"),
        (["methods=full"], "the full cache is what the others are compared with"),
        (["budgets=2"], "budgets must be in"),
        (["data=missing.jsonl"], "missing.jsonl"),
        (["task.max_new_token=4"], "max_new_token"),
    ],
)
def test_refusals_come_before_a_model_loads(prompts, capsys, monkeypatch, more, why):
    monkeypatch.setattr(advise_search, "run_jobs", None)
    keys = {word.partition("=")[0] for word in more}
    kept = [word for word in words(prompts) if word.partition("=")[0] not in keys]
    assert main([*kept, *more]) == 2
    assert why in capsys.readouterr().err


def test_rows_of_no_known_kind(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"query": "a"}\n' * 3)
    assert main([f"data={tmp_path / 'a.jsonl'}", "model=tiny"]) == 2
    assert "its rows have query; kvexp knows rows with prompt, context, article, document" in capsys.readouterr().err
