"""Which method keeps which planted slot: the theory as a table, checked on answers and on the kept sets themselves."""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass

import pytest
import torch
from commands import run_py
from planted import ID, PLANTS, Plant, T, induction, lay, sink
from planted import WORDS as PLANTED_WORDS
from small import small
from torch import Tensor
from turns import in_turn

import kvexp.methods
from kvexp.core import Budget, EvictionContext, Method, Surrogate
from kvexp.generate import generate
from kvexp.generate.inputs import GenerationParams
from kvexp.generate.loglikelihood import continuation_logprobs
from kvexp.generate.prefill import forward_last
from kvexp.hf import EvictionCache, calibrate_queries, train_surrogate
from kvexp.methods import (
    A2SF,
    CAKE,
    CAOTE,
    CUR,
    H2O,
    H2OC,
    RKV,
    TOVA,
    VATP,
    Compactor,
    DilatedWindow,
    ExpectedAttention,
    Full,
    H2ODamping,
    Ideal,
    KeyAttention,
    KeyDiff,
    Keyformer,
    KeyformerA2SF,
    KNorm,
    KVzap,
    KVzip,
    KVzipPlus,
    LagKV,
    PyramidKV,
    QFilters,
    Random,
    SnapKV,
    SpAtten,
    StreamingLLM,
    TriAttention,
    Window,
)
from kvexp.run.guard import check_hydra, check_job, check_source
from kvexp.run.store import runs
from kvexp.util import CONF, ConfigError

# Which method keeps which planted slot: the theory as a table, checked on answers and on the kept sets themselves.


BUDGET = Budget(tokens=12)  # of 96; eleven stay when the question comes, the twelfth is the question

# One row per method, one mark per plant in the order of PLANTS: + right, - wrong, g right
# where query heads share a kv head (llama) and wrong elsewhere. A new method adds a row.
# sink, loud; needle, unseen, long ago, a while ago, just now; long answer, told; recency, ALiBi; induction; seen below
TABLE: dict[str, tuple[Method, str]] = {
    # Nothing is lost.
    "full": (Full(), "++ +++++ ++ ++ + +"),
    # Own top 11 of each query's full row: what the question looks at is there, whoever else looked.
    "ideal": (Ideal(), "++ +++++ ++ ++ + +"),
    # Positions 85 to 95. The fact told at 96 is 16 tokens old when asked: one window too far.
    "window": (Window(), "-- ----- -- ++ - -"),
    # The even ones of the last 22: reaches the told fact (96) and misses the newest token (95).
    "dilated": (DilatedWindow(), "-- ----- -+ -- - -"),
    # Four sinks and seven recent: the window, and the sink whatever its key looks like.
    "streaming": (StreamingLLM(), "++ ----- -- ++ - -"),
    # Sum over all rows. The sink has most; eight mentions make 8, more than the crowd's 6, whenever they came; two make
    # 2. What nobody looked at has crumbs. Without a window a newcomer has no time to collect: told and blue go at once.
    "key_attention": (KeyAttention(), "++ +-++- +- -- + -"),
    # The same in the limit alpha = 1.
    "a2sf, alpha 1": (A2SF(alpha=1.0), "++ +-++- +- -- + -"),
    # The same over heads and layers: idle heads look at the sink only, layer 0 of the induction model gives every token
    # 1 from its successor; what lower layers looked at is kept above (seen below).
    "spatten": (SpAtten(), "++ +-++- +- -- + +"),
    # The same sum; five recent slots let newcomers collect (told) and hold the newest (recency).
    "h2o": (H2O(), "++ +-++- ++ ++ + -"),
    # The same sum times the size of the value, which is one word's in all slots but the sink's, and that is protected.
    "vatp": (VATP(n_sinks=1), "++ +-++- ++ ++ + -"),
    # Four sinks, four of that sum, four recent; at 12 slots of 96 tokens the compensation is not a slot yet.
    "h2o_c": (H2OC(), "++ +-++- ++ ++ + -"),
    # Nothing is damped before the first eviction, so prompts are as in h2o; 45 steps leave 0.9^45 = 1 % of the needle's
    # 8, less than two rows of the crowd that is being decoded.
    "h2o_damping": (H2ODamping(), "++ +-++- -+ ++ + -"),
    # The same sum of noised rows. Fresh noise averages out over rows; two recent slots.
    "keyformer": (Keyformer(), "++ +-++- ++ ++ + -"),
    "keyformer, gaussian": (Keyformer(noise="gaussian"), "++ +-++- ++ ++ + -"),
    "keyformer, constant": (Keyformer(noise="constant"), "++ +-++- ++ ++ + -"),
    "keyformer, none": (Keyformer(noise="none"), "++ +-++- ++ ++ + -"),
    # One score for all layers: as spatten in this.
    "keyformer, shared": (Keyformer(score_scope="shared"), "++ +-++- ++ ++ + +"),
    # What leaves the recent window is lost whatever it has collected: told while decoding, forgotten.
    "keyformer, frozen": (Keyformer(noise="none", key_window="release_frozen"), "++ +-++- +- ++ + -"),
    # A row n tokens old counts 0.9^n: the crowd holds 0.06 / (1 - 0.9) = 0.6. Two new mentions make 1.9, eight that end
    # 9 tokens ago 5.7 x 0.9^9 = 2.2; eight that end 70 ago nothing. No window: newcomers go at once, except with ALiBi,
    # where a newcomer has 0.5 of its own and all older than nine tokens have faded below that.
    "a2sf, alpha 0.9": (A2SF(alpha=0.9), "++ +--++ -- -+ - -"),
    "a2sf, alpha 0.9, window": (A2SF(alpha=0.9, protect_recent=2), "++ +--++ -+ ++ - -"),
    "keyformer_a2sf": (KeyformerA2SF(), "++ +--++ -+ ++ - -"),
    # At 0.1 nine tokens are 1e-9: what the last row or two looked at. With ALiBi those are the newest themselves.
    "a2sf, alpha 0.1": (A2SF(alpha=0.1), "++ +---+ -- -+ - -"),
    # The last row alone. While an answer is decoded it is another row, and the needle is gone after one.
    "tova": (TOVA(), "++ +---+ -- -+ - -"),
    # The same row, times how far the slot's value lies from the output, which mostly says "no" as the crowd does: a P
    # has 0.062 / 0.938 * 0.17 = 0.011, a needle that nobody looks at 0.0011 * 1.3, and sink and crowd are 13 slots.
    "caote": (CAOTE(), "++ +---+ -- -+ - -"),
    # 93 of 96 values say "no", and so does their mean: a P has 0.066 * 0.023 = 0.0015, such a needle 0.0011 * 1.39 =
    # 0.0016. While an answer of "no" is decoded into eleven slots, their mean says "no" less, and it goes.
    "caote, fast": (CAOTE(form="fast"), "++ +++++ -- -+ - +"),
    # The last four rows, once, and those four tokens: as tova at the end of the prompt, but nothing is evicted later.
    "snapkv": (SnapKV(window=4, kernel=3), "++ +---+ ++ ++ - -"),
    # One layer has it all: as snapkv. In the two of the induction model slots go from the top layer, where the phrase
    # is looked up, to the bottom one: 20 and 4, which are the observers.
    "pyramidkv": (PyramidKV(window=4, kernel=3), "++ +---+ ++ ++ - -"),
    # The same four rows, once. A needle that one or two of them look at has 0.25 or 0.5 of their attention and a
    # variance of 0.25 or 0.33, two hundred times; sink and crowd have 0.17 and 0.06 in each and hardly vary.
    "cake": (CAKE(window=4, kernel=3), "++ +---+ ++ ++ - -"),
    # The last four tokens and seven more. A rare key resembles few, which is worth 0.0058 more than filler; a tenth of
    # I is 0.0062 for the crowd and its neighbours, more slots than there are. Two mentions in four rows beat that,
    # older ones count nothing. Where query heads share a kv head, an idle one's logit for the sink is the largest of
    # all, so the sink takes all of I, and rare keys stay whoever looks, as in keydiff.
    "rkv": (RKV(window=4, kernel=3), "++ +ggg+ ++ ++ + g"),
    # Short keys: the quiet sink, and the needle nobody looked at. Every other vital slot has the longest key.
    "knorm": (KNorm(), "+- -+--- -- -- - -"),
    # The sink, 3 tokens behind the 23 partitions, the last partition, and one token of each of the three before; once.
    "lagkv": (LagKV(n_sinks=1, lag=4), "++ ----- -+ ++ - -"),
    # Values have one length, but the sink's is empty: a share of 1/15 in the first block and of 1/16 in all others, so
    # four sinks and the block's newest seven stay, 9 to 15; where the sink says something too, the newest. Once.
    "cur, value": (CUR(leverage="value"), "++ ----- -+ -- - -"),
    # What the mean prompt query looks at, and what few look at strongly, for exp(logit) is lopsided: eight mentions of
    # 92 rows give the needle 14 * 8 / 92 = 1.2 and 14^2 * 0.079 / 2 = 7.8, two of them 0.3 and 2.1, a P 4. Once.
    "expected_attention": (ExpectedAttention(), "++ +-++- ++ -+ + -"),
    # Calibrated on the prompt itself: what the average of its queries looks at, the sink (its key times 0.93 or more)
    # and the crowd (0.2 or more). Eight mentions of 96 turn it by 0.056 to the needle, to a fact told later not at all.
    # The newest is protected.
    "qfilters": (QFilters(), "++ ----- -- ++ - -"),
    # The prompt from the fifth token on is fed again, 40 tokens at a time, each beside its own slots. One mention that
    # stands in the needle's 40 is enough, 0.5 (the fed needle has the other half) against a P's 0.06; mentions that
    # stand later (a while ago, just now) read another part. Else the newest win by a smaller crowd. Once.
    "kvzip": (KVzip(chunk=40, instruct=False), "++ +-+-- ++ -+ + -"),
    # Of one length are all values but the sink's, and all that attention gets.
    "kvzip_plus": (KVzipPlus(chunk=40, instruct=False), "++ +-+-- ++ -+ + -"),
    # Trained on three copies of the prompt: what kvzip_plus sees of each word (with learned positions: of each place).
    # A word that no prompt had, told, is like any other, and the newest stay; two of those are protected.
    "kvzap": (KVzap(n_sinks=1, protect_recent=2), "++ +-+-- +- ++ + -"),
    # A key that stands once is an outlier, whatever its norm and whoever looks: its leverage is near 1, a P's 1/12, a
    # filler's 1/74, and all have a spread of 0.1. Twice that beats the crowd, at which everyone looks (with fifteen
    # idle heads, which look at nothing, it stands 11 spreads above the mean). A phrase said five times: 20 outliers of
    # 1/5, behind the crowd's twelve. Once, and the last two stay.
    "compactor": (Compactor(n_sinks=1, n_recent=2, blending=2.0), "++ +++++ ++ ++ - +"),
    # The mean query times the key: 5 for the sink, 4 for a P; 8 * 14 / 96 = 1.2 for a needle mentioned eight times is
    # more than the fillers' 0 and less than the thirteen.
    "triattention": (TriAttention(), "++ ----- -- ++ - -"),
    # Rare words, whoever looks: the filler is the mean key. One needle beside one sink, eight mentions and the crowd's
    # 12, one told fact, one blue. A phrase said five times is 20 slots besides the sink, of which the newest ten stay.
    "keydiff": (KeyDiff(), "++ +++++ ++ ++ + +"),
}


def ask(plant: Plant, method: Method, budget: Budget | None, batch: int = 1) -> tuple[Tensor, list[set[int]]]:
    """Logits [batch, V] of the answer, and what the vital head held when the question came; row i has noise seed i."""
    learned = plant.model.config.model_type == "gpt2"
    cache = EvictionCache(
        plant.model,
        method,
        budget if method.evicts else None,
        mode="mask" if method.simulation_only else "overwrite",
        positions="original" if learned else None,  # streaming_llm cannot renumber learned positions
        max_new_tokens=len(plant.steps),
        seeds=list(range(batch)),
        calibration=calibrate_queries(plant.model, [plant.prompt]) if method.needs.calibration else None,
        surrogate=learned_of(plant) if method.needs.surrogate else None,
    )
    ids = torch.tensor([plant.prompt]).expand(batch, -1)
    mask = torch.ones_like(ids)
    with torch.inference_mode():
        logits = forward_last(plant.model, ids, mask, cache)
        for step in plant.steps:
            held = [set(row[plant.head]) for row in cache.kept_positions(plant.layer)]
            mask = torch.cat([mask, mask[:, :1]], dim=1)
            logits = forward_last(plant.model, torch.full((batch, 1), step), mask, cache)
    return logits, held


def learned_of(plant: Plant) -> Surrogate:
    """What KVzip+ sees of the prompt itself, learned three times over: a word of one prompt would be half believed."""
    method = KVzipPlus(n_sinks=1, chunk=40, instruct=False)
    return train_surrogate(plant.model, method, [plant.prompt] * 3, [], None).surrogate


def margin(logits: Tensor, answer: int) -> float:
    """By how much the answer leads over the best other word (negative: it does not)."""
    others = logits.clone()
    others[answer] = -torch.inf
    return float(logits[answer] - others.max())


@dataclass(frozen=True)
class Selection(Method):
    """Keeps (or gives up) these positions first: the controls that show which slots matter."""

    these: tuple[int, ...] = ()
    keep: bool = True

    def priority(self, ctx: EvictionContext) -> Tensor:
        chosen = torch.isin(ctx.positions, torch.tensor(self.these))
        return (chosen == self.keep).float()


EVERY = [(name, layout) for name, (_, layouts) in PLANTS.items() for layout in layouts]


def each_in_one_layout():
    """Every method with every plant; one layout of each pair in every run of the tests, in turn, the others slow."""
    for number, method in enumerate(TABLE):
        for place, (name, (_, layouts)) in enumerate(PLANTS.items()):
            for turn, layout in enumerate(layouts):
                quick = turn == (number + place) % len(layouts)
                yield pytest.param(method, name, layout, marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "layout"), EVERY)
def test_the_vital_slots_decide_and_no_other(name: str, layout: str) -> None:
    plant = PLANTS[name][0](layout)
    before = len(plant.prompt) + len(plant.steps) - 1
    few = Budget(tokens=len(plant.vital), counts_self=False)
    most = Budget(tokens=before - len(plant.vital), counts_self=False)
    right, held = ask(plant, Full(), None)
    assert margin(right[0], plant.answer) > 0.25
    assert held[0] == set(range(before))
    alone, held = ask(plant, Selection(plant.vital), few)
    assert held[0] == set(plant.vital)
    assert margin(alone[0], plant.answer) > 0.25
    without, held = ask(plant, Selection(plant.vital, keep=False), most)
    assert held[0] == set(range(before)) - set(plant.vital)
    assert margin(without[0], plant.answer) < -0.25


@pytest.mark.parametrize(("method", "name", "layout"), list(each_in_one_layout()))
def test_each_method_keeps_what_its_score_says(method: str, name: str, layout: str) -> None:
    plant = PLANTS[name][0](layout)
    passes = TABLE[method][1].replace(" ", "")[list(PLANTS).index(name)] in ("+g" if layout == "llama" else "+")
    logits, held = ask(plant, TABLE[method][0], BUDGET)
    assert (PLANTED_WORDS[int(logits[0].argmax())] == PLANTED_WORDS[plant.answer]) == passes
    if not TABLE[method][0].simulation_only:  # a simulation holds everything
        assert bool(held[0] & set(plant.vital)) == passes
        decoded = len(plant.steps) - 1
        once = not TABLE[method][0].evicts_while_decoding
        if method not in ("pyramidkv", "cake"):  # whose two layers share the slots of induction and seen below
            assert len(held[0]) == (len(plant.prompt) + decoded if method == "full" else 11 + once * decoded)


@pytest.mark.parametrize("name", ["sink", "needle", "recency"])
def test_random_keeps_a_slot_as_often_as_chance_says(name: str) -> None:
    """11 of 96 slots by lot: 256 seeds keep one given slot 29 times, standard deviation 5.1."""
    plant = PLANTS[name][0]("llama")
    logits, held = ask(plant, Random(), BUDGET, batch=256)
    right = logits.argmax(-1) == plant.answer
    assert right.tolist() == [bool(row & set(plant.vital)) for row in held]
    assert abs(int(right.sum()) - 256 * 11 / 96) < 4 * 5.1


def test_fresh_noise_averages_out_and_one_draw_per_key_does_not() -> None:
    """Two mentions make 2, the crowd 6 each with fresh noise, but one draw for all rows can ruin five of the crowd."""
    plant = PLANTS["just_now"][0]("llama")
    fresh, per_key = (ask(plant, Keyformer(fresh=fresh), BUDGET, batch=64)[1] for fresh in (True, False))
    assert sum(16 in row for row in fresh) == 0
    assert 16 < sum(16 in row for row in per_key) < 56


@pytest.mark.parametrize(("method", "newest"), [("h2o", 5), ("h2o_damping", 1), ("keyformer", 2), ("snapkv", 4)])
def test_recent_windows_are_exactly_as_wide_as_said(method: str, newest: int) -> None:
    """Half, 20 % and 30 % of 12 slots, less the question itself; snapkv's last four prompt tokens, its observers, all
    stay. The crowd wins every other slot.
    """
    plant = PLANTS["recency"][0]("llama")
    _, held = ask(plant, TABLE[method][0], BUDGET)
    assert {p for p in held[0] if p > 13} == set(range(T - newest, T))


def test_constant_noise_keeps_what_no_noise_keeps() -> None:
    for name, layout in EVERY:
        plant = PLANTS[name][0](layout)
        constant, none = (ask(plant, Keyformer(noise=noise), BUDGET) for noise in ("constant", "none"))
        assert constant[1] == none[1]


def test_each_kv_head_keeps_its_own() -> None:
    """Only the last query head of the last group looks at the needle: h2o keeps it there, spatten in all heads."""
    plant = PLANTS["needle"][0]("llama")
    held = {}
    for method in (H2O(), SpAtten()):
        cache = EvictionCache(plant.model, method, BUDGET)
        ids = torch.tensor([plant.prompt])
        with torch.inference_mode():
            forward_last(plant.model, ids, torch.ones_like(ids), cache)
        held[method.name] = [16 in head for head in cache.kept_positions(0)[0]]
    assert held == {"h2o": [False, True], "spatten": [True, True]}


@pytest.mark.parametrize(
    ("method", "said"), [(Full(), "B C D"), (H2O(), "B C D"), (Keyformer(), "B C D"), (Window(), "B . .")]
)
def test_generate_copies_a_phrase_as_far_as_its_slots_survive(method: Method, said: str) -> None:
    """The first word comes from the prefill, which is never evicted; C and D must be read from what is left."""
    plant = induction("gpt2")
    budget = None if method == Full() else BUDGET
    out = generate(
        plant.model, [plant.prompt + plant.steps], method, budget, decoding=GenerationParams(max_new_tokens=3)
    )
    assert " ".join(PLANTED_WORDS[token] for token in out.tokens[0]) == said


def test_the_sink_is_the_first_real_token_of_a_padded_row() -> None:
    model = sink("llama").model
    prompts = [lay({}), lay({}, length=T - 23)]
    for method, better in ((StreamingLLM(), True), (Window(), False)):
        yes, no = (
            continuation_logprobs(model, prompts, [[ID["?"], ID[word]]] * 2, method, BUDGET) for word in ("yes", "no")
        )
        assert [a[1] > b[1] for a, b in zip(yes, no, strict=True)] == [better, better]


@pytest.mark.parametrize(
    ("pad", "method"),
    [("N", m) for m in (Full(), Window(), H2O(), Keyformer(), TOVA(), SnapKV(window=4), KNorm())]
    + [("m", m) for m in (H2O(), KeyAttention(), Keyformer(noise="none"), SpAtten())],
)
def test_padding_is_neither_seen_nor_heard(pad: str, method: Method) -> None:
    """Pads that are needles: whoever sees one says yes, and knorm would keep nothing else (it has the shortest key).

    Pads that mention the needle: if their rows counted, 23 mentions would make the unseen needle a heavy hitter.
    """
    plant = PLANTS["unseen"][0]("llama")
    prompts = [lay({}, length=T + 23), lay({}) if pad == "N" else plant.prompt]
    plant.model.config.pad_token_id = ID[pad]
    budget = BUDGET if method.evicts else None
    yes, no = (
        continuation_logprobs(plant.model, prompts, [[ID["?"], ID[word]]] * 2, method, budget) for word in ("yes", "no")
    )
    plant.model.config.pad_token_id = None
    assert all(a[1] < b[1] - 0.4 for a, b in zip(yes, no, strict=True))


def test_the_table_is_complete() -> None:
    assert all(len(marks.replace(" ", "")) == len(PLANTS) for _, marks in TABLE.values())
    covered = {type(method) for method, _ in TABLE.values()} | {Random}
    assert covered == {getattr(kvexp.methods, name) for name in kvexp.methods.__all__}


# Files that somebody planted among the configurations: each would leave a folder behind if any of it were obeyed.
#
# Every way a file can come in (a folder of one's own, another main file, a list of defaults, a search path) and every
# place from which Hydra makes something run.


FEW = small("limit=1", "task.max_new_tokens=2", "task.nll=false", "method=full")
SECRET = "sk-0123456789abcdef0123456789abcdef"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """(marker, a folder of configurations, a package beside it that leaves the marker when it is imported)."""
    marker = tmp_path / "was_run"
    module = f"planted_{abs(hash(tmp_path))}"
    package = tmp_path / "site" / module
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"import os\nos.makedirs({str(marker)!r}, exist_ok=True)\n")
    (package / "config.yaml").write_text("a: 1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    return marker, tmp_path / "conf", module


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # where Hydra's own loggers write
    return lambda *words: run_py(monkeypatch, capsys, *words, *FEW, f"outputs_dir={tmp_path / 'out'}")


def refused(done, marker, tmp_path, *words):
    """The one line of a refusal; nothing was run, made or recorded."""
    code, out, err = done
    assert code == 1 and "Traceback" not in out + err, out + err
    assert not marker.exists(), "planted code was run"
    assert not list(runs(tmp_path / "out")) if (tmp_path / "out").exists() else True
    lines = [line for line in err.splitlines() if line]
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    for word in words:
        assert word in lines[0], lines[0]


MKDIR = "{_target_: os.mkdir, path: MARKER}"
PLANTED = {  # what stands in the file: words of the refusal
    "hydra: {callbacks: {evil: " + MKDIR + "}}": ("hydra.callbacks.evil", "os.mkdir"),
    "hydra: {callbacks: {table: {_target_: hydra_plugins.kvexp_shipping.os.mkdir, _args_: [MARKER]}}}": ("callbacks",),
    "hydra: {callbacks: '${evil}'}\nevil: {x: " + MKDIR + "}": ("hydra.callbacks",),
    "hydra: {callbacks: {evil: '${evil}'}}\nevil: " + MKDIR: ("hydra.callbacks.evil",),
    "hydra: {launcher: {_target_: os.mkdir}}": ("hydra.launcher._target_", "os.mkdir"),
    "hydra: {launcher: {_target_: '${evil}'}}\nevil: os.mkdir": ("hydra.launcher._target_",),
    "hydra: {launcher: {_target_: hydra_plugins.kvexp_shipping.os.mkdir, _args_: [MARKER]}}": ("hydra.launcher._tar",),
    "hydra: {launcher: {more: " + MKDIR + "}}": ("hydra.launcher.more._target_",),
    "hydra: {launcher: {initializer: MODULE}}": ("hydra.launcher.initializer", "on the command line"),
    "hydra: {launcher: {init: {runtime_env: {working_dir: /}}}}": ("hydra.launcher.init.runtime_env",),
    "hydra: {launcher: {slurm_setup: [mkdir MARKER]}}": ("hydra.launcher.slurm_setup", "on the command line"),
    "hydra: {launcher: {slurm_additional_parameters: {wrap: mkdir}}}": ("slurm_additional_parameters.wrap",),
    "hydra: {sweeper: {_target_: os.mkdir}}": ("hydra.sweeper._target_", "os.mkdir"),
    "hydra: {sweeper: {more: " + MKDIR + "}}": ("hydra.sweeper.more._target_",),
    "hydra: {job_logging: {handlers: {x: {class: MODULE.Handler}}}}": ("hydra.job_logging", "leave it out"),
    "hydra: {job_logging: {handlers: {x: {(): os.mkdir, path: MARKER}}}}": ("hydra.job_logging",),
    "hydra: {job_logging: {filters: {x: {(): os.mkdir, path: MARKER}}}}": ("hydra.job_logging",),
    "hydra: {job_logging: {formatters: {x: {(): os.mkdir, path: MARKER}}}}": ("hydra.job_logging",),
    "hydra: {hydra_logging: {handlers: {x: {class: logging.StreamHandler, stream: ext://MODULE.x}}}}": (
        "hydra.hydra_logging",
    ),
    "hydra: {hydra_logging: {formatters: {x: {(): os.mkdir, path: MARKER}}}}": ("hydra.hydra_logging",),
    "hydra: {job: {env_set: {PYTHONSTARTUP: MARKER}}}": ("hydra.job.env_set", "shell"),
    "hydra: {job: {env_copy: [HOME]}}": ("env_copy", "shell"),
    "log: {_target_: os.mkdir, path: MARKER}": ("log._target_", "os.mkdir"),
    "extra: [[{deep: " + MKDIR + "}]]": ("extra[0][0].deep._target_",),
}


@pytest.mark.parametrize("mode", [(), ("-m",)], ids=["run", "sweep"])
@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_file_runs_nothing(command, place, tmp_path, planted, mode):
    marker, conf, module = place
    text = planted.replace("MARKER", str(marker)).replace("MODULE", module)
    (conf / "experiment" / "evil.yaml").write_text(f"# @package _global_\n{text}\n")
    done = command(*mode, "--config-dir", str(conf), "+experiment=evil" if "+" in mode else "experiment=evil")
    refused(done, marker, tmp_path, *PLANTED[planted])


EVIL = "hydra: {callbacks: {evil: " + MKDIR + "}}"


@pytest.mark.parametrize("way", ["config_dir", "cd", "nested", "name", "path", "searchpath", "override", "logging"])
def test_whatever_way_it_comes_in(command, place, tmp_path, way):
    marker, conf, _ = place
    evil = EVIL.replace("MARKER", str(marker))
    (conf / "experiment" / "evil.yaml").write_text(f"# @package _global_\n{evil}\n")
    (conf / "experiment" / "outer.yaml").write_text("# @package _global_\ndefaults: [evil]\n")
    (conf / "main.yaml").write_text(f"defaults: [config, _self_]\n{evil}\n")
    (conf / "hydra" / "callbacks").mkdir(parents=True)
    (conf / "hydra" / "callbacks" / "evil.yaml").write_text(evil.removeprefix("hydra: {callbacks: ").removesuffix("}"))
    (conf / "hydra" / "job_logging").mkdir()
    (conf / "hydra" / "job_logging" / "mine.yaml").write_text("version: 1\nhandlers: {x: {class: os.mkdir}}\n")
    words = {
        "config_dir": ("--config-dir", str(conf), "experiment=evil"),
        "cd": (f"-cd={conf}", "experiment=evil"),
        "nested": ("--config-dir", str(conf), "experiment=outer"),
        "name": ("--config-dir", str(conf), "--config-name", "main"),
        "path": ("--config-path", str(conf), "--config-name", "main", f"hydra.searchpath=[{CONF}]"),
        "searchpath": (f"hydra.searchpath=[file://{conf}]", "experiment=evil"),
        "override": ("--config-dir", str(conf), "hydra/callbacks=evil"),
        "logging": ("--config-dir", str(conf), "hydra/job_logging=mine"),
    }[way]
    refused(command(*words), marker, tmp_path, "job_logging" if way == "logging" else "hydra.callbacks")


@pytest.mark.parametrize("way", ["searchpath", "file", "config_path"])
def test_no_package_is_imported_for_its_configurations(command, place, tmp_path, way):
    marker, conf, module = place
    (conf / "main.yaml").write_text(
        f"defaults: [config, _self_]\nhydra: {{searchpath: ['pkg://{module}', 'file://{CONF}']}}\n"
    )
    words = {
        "searchpath": (f"hydra.searchpath=[pkg://{module}]",),
        "file": ("--config-path", str(conf), "--config-name", "main"),
        "config_path": ("--config-path", f"pkg://{module}"),
    }[way]
    refused(command(*words), marker, tmp_path, f"pkg://{module}")


def test_the_environment_names_no_package_of_configurations(command, place, monkeypatch):
    """Hydra takes the main module's name from there and looks beside it; kvexp says itself where its own are."""
    marker, _, module = place
    monkeypatch.setenv("HYDRA_MAIN_MODULE", f"{module}.run")
    code, out, err = command()
    assert code == 0 and not marker.exists() and "full" in out, err


def test_a_pickled_job_is_not_taken_up(command, place, tmp_path):
    class Evil:
        def __reduce__(self):
            import os

            return os.mkdir, (str(place[0]),)

    (tmp_path / "config.pickle").write_bytes(pickle.dumps(Evil()))
    refused(
        command("--experimental-rerun", str(tmp_path / "config.pickle")), place[0], tmp_path, "--experimental-rerun"
    )


def test_only_the_command_line_trusts(command, place, tmp_path):
    """A file cannot say yes for whoever runs it."""
    marker, conf, _ = place
    for name, text in {
        "code": "model: {trust_remote_code: true}",
        "pickle": "model: {allow_pickle: '${agreed}'}\nagreed: true",
        "search": "hydra: {mode: MULTIRUN, sweeper: {params: {+model.trust_remote_code: 'true'}}}",
    }.items():
        (conf / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
        code, out, err = command("--config-dir", str(conf), f"experiment={name}")
        assert code == 1 and "stands in a configuration file" in err and "Traceback" not in err, err + out
        assert not list(runs(tmp_path / "out")) and not marker.exists()
    assert "stands in" not in command("model.trust_remote_code=true")[2]


def test_what_is_typed_is_trusted():
    """Lines for a shell before a SLURM task are an option of kvexp's: on the command line, not in a file."""
    node = {"launcher": {"_target_": "a.B", "slurm_setup": ["module load cuda"]}, "sweeper": {"_target_": "a.B"}}
    quiet = {"version": 1, "root": {"level": "ERROR"}, "disable_existing_loggers": True}
    node |= {"job_logging": quiet, "hydra_logging": quiet}
    known = {"launcher": ["a.B"], "sweeper": ["a.B"]}
    check_hydra(node, known, {"hydra.launcher.slurm_setup"})
    with pytest.raises(ConfigError, match="slurm_setup stands in a configuration file"):
        check_hydra(node, known, {"hydra.launcher.slurm_setu", "slurm_setup"})
    check_job({"task": {"tasks": ["piqa", "copa"]}}, set())
    check_job({"task": {"tasks": ["own.yaml"]}}, {"task.tasks"})
    with pytest.raises(ConfigError, match=re.escape("task.tasks=[own.yaml]")):
        check_job({"task": {"tasks": ["own.yaml"]}}, {"task"[:3]})


def test_folders_and_hydras_own_packages_are_searched():
    for path in ("file:///home/me/conf", "/home/me/conf", "structured://", "pkg://hydra.conf", "pkg://hydra_plugins.x"):
        check_source(path)
    for path in ("pkg://evil", "pkg://hydrant.conf", "pkg://", "pkg://evil/hydra"):
        with pytest.raises(ConfigError, match="imports no package"):
            check_source(path)


def test_a_line_end_in_an_option_reaches_no_shell(command):
    words = ("-m", "hydra/launcher=submitit_local", "hydra.launcher.submitit_folder='a\nmkdir b'")
    code, out, err = command(*words)
    assert code == 1 and "hydra.launcher.submitit_folder" in err and "line end" in err, out + err


@pytest.mark.parametrize("logging", ["stdout", pytest.param("default", marks=pytest.mark.slow)])
def test_hydras_own_logging_and_an_own_folder_go_on_working(stage, place, tmp_path, logging):
    """In a process of its own: Python's logging configurations close the streams of handlers that are there."""
    _, conf, _ = place
    (conf / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 3\nkv_ratio: ${oc.select:nothing,0.4}\n")
    out = tmp_path / "out"
    words = ("--config-dir", str(conf), "experiment=mine", f"hydra/job_logging={logging}", *FEW, f"outputs_dir={out}")
    code, said = stage.run(words, tmp_path / "log", f"import os; os.chdir({str(tmp_path)!r})")
    assert code == 0, said
    assert list(runs(out))


WORDS = (
    *("seed=${oc.env:PLANTED_KEY}", "seed='${oc.env:PLANTED_KEY,1}'", "+x=${oc.env:PLANTED_KEY}"),
    *("model.dtype=${oc.env:PLANTED_KEY}", "+a=oc|seed='${${a}.env:PLANTED_KEY}'"),
    *("seed='${oc.decode:${oc.env:PLANTED_KEY}}'", "hydra.sweep.dir=${oc.env:PLANTED_KEY}"),
    *("hydra.job.env_copy=[PLANTED_KEY]", "task=${oc.env:PLANTED_KEY}", "experiment=secret"),
)
MODES = ((), ("-m",), ("--cfg", "job", "--resolve"), ("--dry-run",))


@pytest.mark.parametrize(("mode", "word"), in_turn(MODES, WORDS, of=2))
def test_the_environment_reaches_no_message_and_no_file(command, place, tmp_path, monkeypatch, word, mode):
    _, conf, _ = place
    monkeypatch.setenv("PLANTED_KEY", SECRET)
    (conf / "experiment" / "secret.yaml").write_text("# @package _global_\nlog: {project: '${oc.env:PLANTED_KEY}'}\n")
    code, out, err = command(*mode, "--config-dir", str(conf), *word.split("|"))
    assert SECRET not in out + err
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file
    assert "Traceback" not in out + err, out + err
    if not word.startswith(("hydra.sweep", "task=")) or mode == ("-m",):  # else nothing asks for it
        assert code == 1 and (word.startswith("task=") or "environment" in err), err


def test_nothing_is_built_of_what_an_interpolation_hides(command, place, tmp_path):
    """An option of a launcher that kvexp lists, whose value is written elsewhere or as a text."""
    marker, conf, _ = place
    evil = MKDIR.replace("MARKER", str(marker))
    for value in ("'${evil}'", f"'${{oc.decode:\"{evil}\"}}'"):
        text = "# @package _global_\ndefaults: [{override /hydra/launcher: joblib}]\n"
        text += f"hydra: {{launcher: {{n_jobs: {value}}}}}\nevil: {evil}\n"
        (conf / "experiment" / "evil.yaml").write_text(text)
        done = command("-m", "--config-dir", str(conf), "experiment=evil")
        refused(done, marker, tmp_path, "hydra.launcher.n_jobs._target_", "os.mkdir")


def test_no_file_takes_the_name_of_a_method(command, place, tmp_path):
    marker, conf, _ = place
    (conf / "method").mkdir()
    (conf / "method" / "h2o.yaml").write_text("_target_: kvexp.methods.H2O\nrecent_ratio: 0.9\n")
    refused(command("--config-dir", str(conf), "seed=1"), marker, tmp_path, "method/h2o.yaml is called as an option of")
