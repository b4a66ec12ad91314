"""Whatever a configuration says: it runs, or one ConfigError says why not. Never another exception, never a wrong row.

The short form is part of every test run; 500 values, and 500 overrides carried out on the tiny model, are marked slow.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

import pytest
from commands import config_of
from composition import GROUPS
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf, open_dict

from kvexp.run.jobs import HydraJob, run_job, runs_of
from kvexp.run.session import Session
from kvexp.run.store import runs
from kvexp.util.errors import ConfigError, Rule, reason_against, refuse
from kvexp.util.fields import AtLeast, Odd, Range, check_fields, typed

TASKS = ("sample", "testbed_qa", "testbed_choice", "cnn_dailymail", "longbench", "gsm8k_cot", "perplexity", "lm_eval")
WORDS = st.one_of(
    st.sampled_from(["", " ", "auto", "full", "null", "1e400", "-1", "0/2", "/", "..", "~", "{}", "{prompt}"]),
    st.sampled_from(["é\u202e\x00", "x" * 5000]),
    st.text(max_size=12),
)
SCALARS = st.one_of(
    *(st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.integers(-3, 40), st.floats(), WORDS),
    st.floats(-1, 2),
)
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(st.sampled_from(["_target_", "a", "0"]), SCALARS, max_size=2),
)
MILD = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 7), st.floats(-0.5, 1.5), st.sampled_from(["", "auto", "mask", "é{}"])
)


@cache
def composed(method, task):
    few = ["limit=1", "task.max_new_tokens=3"] if task == "sample" else ["limit=1"]
    return config_of("model=tiny", f"method={method}", f"task={task}", "kv_ratio=0.5", *few)


def keys(node, place=""):
    """Every place of the configuration, groups included."""
    for key in node:
        here = f"{place}.{key}" if place else str(key)
        if here.split(".")[0] in ("hydra", "log", "experiment", "outputs_dir"):
            continue
        yield here
        if isinstance(node, DictConfig) and isinstance(node._get_node(key), DictConfig):
            yield from keys(node[key], here)


@st.composite
def jobs(draw, values, tasks=TASKS):
    """A job whose configuration had up to three settings replaced, or one added."""
    method, task = draw(st.sampled_from(GROUPS["method"])), draw(st.sampled_from(tasks))
    config = copy.deepcopy(composed(method, task))
    places = sorted(keys(config))
    changed = draw(st.lists(st.tuples(st.sampled_from(places), values), min_size=1, max_size=3))
    with open_dict(config):
        for place, value in changed:
            try:
                OmegaConf.update(config, place, value, merge=False, force_add=True)
            except ValueError:  # a place inside of what has become a list: no command line can name it
                reject()
    words = [f"{place}={value!r}" for place, value in changed]
    return HydraJob(config, words, {"model": "tiny", "method": method, "task": task}, None)


def refusal(job):
    """Why it is refused; None where its settings are right. Nothing is loaded."""
    try:
        for one in runs_of(job, Session()):
            one.task.check_options()
    except ConfigError as error:
        return str(error)
    return None


def fuzzed(check, examples, **drawn):
    """Give `check` so many drawn jobs, always the same."""
    few = settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    few(given(**drawn)(check))()


@pytest.mark.parametrize("examples", [10, pytest.param(500, marks=pytest.mark.slow)])
def test_any_value_is_taken_or_refused_in_words(examples):
    def check(job):
        why = refusal(job)
        assert why is None or (why.strip() and "Traceback" not in why)

    fuzzed(check, examples, job=jobs(VALUES))


@pytest.mark.parametrize(
    ("examples", "tasks"),
    [(8, ("sample",)), pytest.param(500, ("sample", "testbed_qa", "testbed_choice"), marks=pytest.mark.slow)],
)
def test_what_is_taken_runs_or_is_refused_in_words(examples, tasks, tmp_path_factory, capsys):
    def check(job):
        folder = tmp_path_factory.mktemp("fuzz")
        with open_dict(job.config):
            job.config.outputs_dir = str(folder)
        run_job(job, Session())
        err = capsys.readouterr().err
        assert "Traceback" not in err, (job.overrides, err)
        for row in (row for run in runs(folder) for row in run.rows()):
            assert row["skipped"] or row["metrics"], job.overrides
            assert all(math.isfinite(value) for value in row["metrics"].values()), job.overrides
            assert row["skipped"] or row["prompt_tokens"] > 0

    fuzzed(check, examples, job=jobs(MILD, tasks))


# What the fuzzing found, each once a bare traceback.
@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("model.kind", [], "model.kind must be one of pretrained, random"),
        ("model.config", None, "model.config must be a group of settings, got None"),
        (
            "model.config.num_key_value_heads",
            3,
            "model.config cannot be that of a llama model: 2 layers of 4 heads in 3",
        ),
        ("model.config.num_hidden_layers", 0, "num_hidden_layers must be a whole number of at least 1, got 0"),
        ("model.config.vocab_size", -1, "model.config cannot be that of a llama model"),
        ("generation.eos", -0.25, "eos must be a token id"),
        ("generation.eos", [1, True], "eos must be a token id"),
        ("cache", 26, "cache must be a group of settings"),
        ("cache", {}, "cache.mode is missing"),
    ],
)
def test_found_by_fuzzing(tmp_path, capsys, place, value, message):
    config = copy.deepcopy(composed("h2o", "sample"))
    with open_dict(config):
        OmegaConf.update(config, place, value, merge=False, force_add=True)
        config.outputs_dir = str(tmp_path)
    session = Session()
    run_job(HydraJob(config, [place], {"model": "tiny", "method": "h2o", "task": "sample"}, None), session)
    err = capsys.readouterr().err
    assert session.failures and message in err and "Traceback" not in err


# -- what a field may hold is said at the field and checked in one place; what excludes each other is a table ----------


SHARE, LEFT_OPEN = Annotated[float, Range(0, 1)], Annotated[float, Range(0, 1, above=True)]
COUNT = Annotated[int, AtLeast(0)]
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("hint", "fine", "wrong"),
    [
        (SHARE, (0, 1, 0.5), {-0.1: "in [0, 1]", 1.5: "in [0, 1]", NAN: "in [0, 1]", "x": "a number"}),
        (LEFT_OPEN, (0.1, 1), {0: "in (0, 1]", True: "a number"}),
        (COUNT, (0, 7), {-1: "at least 0", 0.5: "a whole number", None: "a whole number"}),
        (COUNT | None, (None, 0), {-1: "at least 0 or null", "x": "a whole number or null"}),
        (Annotated[float, Range(0, above=True)], (1e-9,), {0: "above 0", INF: "above 0", NAN: "above 0"}),
        (Annotated[int, Odd(1)], (1, 7), {4: "odd and at least 1", -1: "odd and at least 1"}),
        (COUNT | Literal["adaptive"], ("adaptive", 3), {-1: "at least 0 or adaptive"}),
        (Literal["max", "avg"], ("max",), {"mean": "one of max, avg"}),
    ],
)
def test_values_and_what_is_said_of_others(hint: Any, fine: tuple[Any, ...], wrong: dict[Any, str]) -> None:
    for value in fine:
        assert typed(value, hint, "method.x") == value
    for value, allowed in wrong.items():
        with pytest.raises(ConfigError) as caught:
            typed(value, hint, "method.x")
        assert str(caught.value) == f"method.x must be {allowed}, got {value!r}"


@dataclass(frozen=True)
class Chunks:
    size: Annotated[int, AtLeast(1)] = 4
    overlap: COUNT = 0
    extra: Unknown = None  # type: ignore[name-defined]  # noqa: F821


@dataclass(frozen=True)
class Checked:
    size: Annotated[int, AtLeast(1)] = 4
    overlap: COUNT = 0


RULES: tuple[Rule[Checked], ...] = (
    (lambda c: c.overlap >= c.size, "overlap={c.overlap} leaves nothing of size={c.size}"),
    (lambda c: c.size == 13, "not 13"),
)


def test_fields_of_an_object_are_checked_by_their_types_alone() -> None:
    check_fields(Checked())
    with pytest.raises(ConfigError, match="size must be at least 1, got 0"):
        check_fields(Checked(size=0))
    check_fields(Chunks(size=0))  # a name that the class's module does not have: nothing is known of its fields


def test_the_first_rule_that_applies_is_said_with_the_values_found() -> None:
    assert reason_against(Checked(), RULES) is None
    assert reason_against(Checked(13, 13), RULES) == "overlap=13 leaves nothing of size=13"
    with pytest.raises(ConfigError, match="not 13"):
        refuse(Checked(13), RULES)
