"""Same configuration, same machine, same rows: whatever the batch size, the launcher, the order and the company.

What is promised, and tested here:

- the same command twice: every byte but times (tests/faults holds it to that through kills);
- another batch size or launcher: the same tokens, so the same text, metrics, counts and kept positions; what is summed
  up in float32 over another shape (attention_kept, log-probabilities) within the tolerances below; bytes and batch_size
  say what the batch was. A row whose answer ends before its batch does is fed padding until then, but its receipt is
  taken when it ends;
- another order of the rows, or some of them left out: the same row for the same example but for its index, draws of
  sampling and noise included.

Tokens can differ between batch sizes where two logits are closer than float32 rounding. Nothing rules that out on every
model; on the testbed it does not happen. In half precision it happens often, so there, on a CPU, every prompt goes
through the model by itself, and batch sizes and launchers give every byte.
"""

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import kvexp.sweep.prefill_groups as together
from kvexp.config.settings import settings_of
from kvexp.errors import ConfigError
from kvexp.evaluate.evaluate_run import evaluate_run
from kvexp.session import Session

ROOT = Path(__file__).resolve().parents[1]
SHAPED = ("kv_bytes", "peak_kv_bytes", "batch_size")  # of a receipt: they say what the batch was
ATTENTION_KEPT = 1e-5  # a share of 1
LOGPROB = 1e-4  # nats, summed over a choice or meant over a continuation


def rows(out, methods, words, launcher="basic"):
    """Method -> its rows, but for times."""
    members = [_settings(out, f"method={method}", *words) for method in methods]
    if launcher == "shared_prefill":
        for group in together.prefill_groups(members):
            together.run_group(group, Session())
    return {one.method.name: [_timeless(row) for row in evaluate_run(one).rows()] for one in members}


def _settings(out, *words):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("config", [*words, "kv_ratio=0.3", f"outputs_dir={out}"])
    plain = OmegaConf.to_container(config, resolve=True)
    return settings_of({k: v for k, v in plain.items() if k not in ("log", "experiment")}, {})


def _timeless(row):
    return {key: value for key, value in row.items() if key != "seconds"}


def assert_alike(one, other):
    """Equal but for the shape of the batch, and for rounding where floats are summed."""
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        a, b = json.loads(json.dumps(a)), json.loads(json.dumps(b))
        for name in SHAPED:
            del a["receipt"][name], b["receipt"][name]
        kept = [row["receipt"].pop("attention_kept") for row in (a, b)]
        assert kept[0] == pytest.approx(kept[1], abs=ATTENTION_KEPT)
        for place, name in (("choices", "logprobs"), ("metrics", "nll")):
            found = [(row.get(place) or {}).pop(name, None) for row in (a, b)]
            assert found[0] == pytest.approx(found[1], abs=LOGPROB)
        assert a == b


METHODS = ("full", "h2o", "keyformer", "random")  # the last two draw noise
TESTBED = ("model=testbed_rope", "limit=9")


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["greedy", "sampling"])
def test_batch_sizes_and_launchers(tmp_path, generation):
    words = (*TESTBED, "task=testbed_summary", f"generation={generation}", "task.max_new_tokens=10")
    alone = rows(tmp_path / "alone", METHODS, (*words, "batch_size=1"))
    assert alone["h2o"] != alone["keyformer"]
    for size in (1, 3, 8):
        for launcher in ("basic", "shared_prefill"):
            found = rows(tmp_path / f"{launcher}{size}", METHODS, (*words, f"batch_size={size}"), launcher)
            for method in METHODS:
                if (size, launcher) == (1, "basic"):
                    assert found == alone, "the same command: every byte"
                assert_alike(alone[method], found[method])


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_half_precision_on_a_cpu(tmp_path, dtype):
    """Prompts of unequal length, each by itself: whatever the batch size and the launcher, every byte."""
    words = ("model=tiny", f"model.dtype={dtype}", "model.device=cpu", "task=sample", "limit=4")
    words += ("task.max_new_tokens=16", "task.nll=false")
    methods = ("full", "h2o")
    alone = rows(tmp_path / "alone", methods, (*words, "batch_size=1"))
    for launcher in ("basic", "shared_prefill"):
        assert rows(tmp_path / launcher, methods, (*words, "batch_size=4"), launcher) == alone
    assert {row["receipt"]["batch_size"] for row in alone["h2o"]} == {1}
    assert (
        evaluate_run(_settings(tmp_path / "alone", "method=h2o", *words)).hash
        == evaluate_run(_settings(tmp_path / "basic", "method=h2o", *words, "batch_size=4")).hash
    )


def test_half_precision_goes_on_with_the_threads_it_was_begun_with(tmp_path, monkeypatch):
    """Other threads sum its products in another order. float32 rows do not go by them."""
    words = ("model=tiny", "task=sample", "method=full", "task.max_new_tokens=2", "task.nll=false")
    for dtype in ("float32", "bfloat16"):
        half = (*words, f"model.dtype={dtype}", "model.device=cpu")
        evaluate_run(_settings(tmp_path, *half, "limit=1"))
        with monkeypatch.context() as patch:
            patch.setattr("kvexp.evaluate.evaluate_run.environment", lambda: {"threads": 77})
            if dtype == "float32":
                assert len(evaluate_run(_settings(tmp_path, *half, "limit=2")).rows()) == 2
                continue
            with pytest.raises(ConfigError, match=r"77 would make others: set OMP_NUM_THREADS=\d+, or remove"):
                evaluate_run(_settings(tmp_path, *half, "limit=2"))
        assert len(evaluate_run(_settings(tmp_path, *half, "limit=2")).rows()) == 2


def test_half_precision_on_a_gpu_is_another_run_in_another_batch(tmp_path, monkeypatch):
    """There prompts stay together, for the time it takes; float32 runs are known without their batch size."""
    monkeypatch.setattr("kvexp.config.model_spec.ModelSpec.resolved_device", lambda spec: "cuda:0")

    def identities(dtype):
        each = [_settings(tmp_path, "model=tiny", f"model.dtype={dtype}", f"batch_size={size}") for size in (1, 4)]
        assert [one.batch_size for one in each] == [1, 4] and all(map(together.can_share, each))
        return [str(one.identity) for one in each], [str(one.baseline().identity) for one in each]

    for dtype, different in (("float32", 1), ("bfloat16", 2), ("float16", 2)):
        assert [len(set(found)) for found in identities(dtype)] == [different, different]


# Questions after the eviction are compared between launchers in test_shared_prefill.py too.
@pytest.mark.parametrize("task", ["testbed_choice", pytest.param("testbed_qa", marks=pytest.mark.slow)])
def test_choices_and_questions(tmp_path, task):
    """Questions about one context share its prefill, choices are judged by log-probability."""
    words = (*TESTBED, f"task={task}", *(["task.question=after_eviction"] if task == "testbed_qa" else []))
    alone = rows(tmp_path / "alone", METHODS, (*words, "batch_size=1"))
    for size, launcher in ((8, "basic"), (3, "shared_prefill")):
        found = rows(tmp_path / launcher, METHODS, (*words, f"batch_size={size}"), launcher)
        for method in METHODS:
            assert_alike(alone[method], found[method])


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Rows of a file in several orders; their ids stay theirs."""
    lines = (ROOT / "conf/task/sample.jsonl").read_text().splitlines()[:4]
    folder = tmp_path_factory.mktemp("texts")
    orders = {"given": lines, "reversed": lines[::-1], "some": [lines[3], lines[1]]}
    for name, order in orders.items():
        (folder / f"{name}.jsonl").write_text("\n".join(order) + "\n")
    return folder


def test_orders_and_subsets(tmp_path, texts):
    words = ("model=tiny", "task=sample", "generation=sampling", "task.max_new_tokens=6", "batch_size=1")
    words += ("task.continuation_words=3",)
    methods = ("full", "keyformer")

    def found(name, *more):
        each = rows(tmp_path / f"{name}{len(more)}", methods, (*words, f"task.data_files={texts}/{name}.jsonl", *more))
        return {m: {r["example"]: {k: v for k, v in r.items() if k != "index"} for r in rs} for m, rs in each.items()}

    given = found("given")
    assert [len(made) for made in given.values()] == [4, 4]
    assert found("reversed") == given
    for part in (found("some"), found("reversed", "limit=3")):
        for method, made in part.items():
            assert 2 <= len(made) <= 3 and made.items() <= given[method].items()


def test_draws_differ_between_examples_and_seeds(tmp_path, texts):
    """Else the tests above would hold of draws that never change."""
    (texts / "same.jsonl").write_text(
        "".join(json.dumps({"id": name, "text": "one two three four five six " * 9}) + "\n" for name in "ab")
    )
    words = ["model=tiny", "task=sample", f"task.data_files={texts}/same.jsonl", "generation=sampling"]
    words += ["task.max_new_tokens=8", "task.nll=false"]
    a, b = rows(tmp_path / "0", ["full"], words)["full"]
    (c, _), (d, _) = (rows(tmp_path / f"s{s}", ["full"], [*words, f"seed={s}"])["full"] for s in (0, 1))
    assert a["output"] != b["output"] and a == c and a["output"] != d["output"]
