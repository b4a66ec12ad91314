"""The calibration pass: its statistics against plain Python, its file, the command, and what a run makes of it."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from small import small
from test_conf import composed
from test_kept_sets import CALIBRATION, FAMILIES, calibration, main_directions, mean_queries, rope_pairs
from tiny import CONFIGS, tiny

from experiments import testbed
from kvexp.core import Budget, CacheConfig, QueryCalibration
from kvexp.core import statistics as query_calibration
from kvexp.core.statistics import CalibrationLayer
from kvexp.hf import EvictionCache, calibrate_queries
from kvexp.hf.calibrate import QUERIES
from kvexp.hf.load import byte_tokenizer
from kvexp.methods import KNorm, QFilters, TriAttention
from kvexp.run import calibrate as kvzap_training
from kvexp.run import calibrate as model_calibration
from kvexp.run import model_spec as calibrated
from kvexp.run.batches import evaluate_run
from kvexp.run.calibrate import calibrate_main as main
from kvexp.run.calibrate import calibrate_main as training
from kvexp.run.calibrate import calibration_texts, sequences_of
from kvexp.run.lm_eval_model import ModelArguments
from kvexp.run.model_spec import ModelSpec, model_digest
from kvexp.run.settings import settings_of
from kvexp.tasks import TestbedSummary
from kvexp.util.errors import CacheError, ConfigError


def drawn(seed: int, *shape: int) -> QueryCalibration:
    dice = torch.Generator().manual_seed(seed)
    direction, mean = torch.randn(2, *shape, generator=dice)
    return QueryCalibration.of(direction, mean, torch.rand(*shape[:3], shape[3] // 2, generator=dice))


# -- the statistics ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_main_direction_is_that_of_plain_python(family: str) -> None:
    made, kv_heads = calibration(family), CONFIGS[family].get("num_key_value_heads", 3)
    want = torch.tensor(main_directions(family)).unflatten(1, (kv_heads, -1))
    torch.testing.assert_close(made.direction, want, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_mean_and_size_are_of_queries_before_rope(family: str) -> None:
    made, (means, sizes) = calibration(family), mean_queries(family)
    torch.testing.assert_close(made.mean.flatten(1, 2), torch.tensor(means), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(made.size.flatten(1, 2), torch.tensor(sizes), rtol=1e-4, atol=1e-5)
    assert made.size.shape[-1] == len(rope_pairs(family))


def test_a_pass_does_not_depend_on_blocks_and_counts_every_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_calibration, "CALIBRATION_BLOCK", 4)
    other, whole = calibrate_queries(tiny("llama"), CALIBRATION), calibration("llama")
    for name in ("direction", "mean", "size"):
        torch.testing.assert_close(getattr(other, name), getattr(whole, name), rtol=1e-4, atol=1e-5)
    assert calibrate_queries(tiny("llama"), CALIBRATION[:2]) != whole


def test_equal_numbers_are_equal_calibrations_and_others_are_not() -> None:
    assert drawn(1, 2, 3, 5, 14) == drawn(1, 2, 3, 5, 14) != drawn(2, 2, 3, 5, 14)
    assert hash(CacheConfig(QFilters(), Budget(tokens=9), calibration=drawn(1, 2, 3, 5, 14)))
    direction, mean = torch.ones(2, 2, 3, 5, 14)
    with pytest.raises(ConfigError, match="direction must be finite numbers in float32"):
        QueryCalibration.of(direction / 0, mean, torch.ones(2, 3, 5, 7))
    with pytest.raises(ConfigError, match="are not the statistics of one model's queries"):
        QueryCalibration.of(direction, mean[:1], torch.ones(2, 3, 5, 7))


# -- in a cache --------------------------------------------------------------------------------------------------------


def test_a_method_that_needs_one_is_refused_without_and_with_another_models() -> None:
    with pytest.raises(ConfigError, match=r"qfilters needs .* calibration=kvexp\.hf\.calibrate_queries"):
        CacheConfig(QFilters(), Budget(tokens=9))
    with pytest.raises(ConfigError, match=r"\[2, 3, 5, 12\], are of another model: this one's are \[2, 3, 5, 14\]"):
        EvictionCache(tiny("llama"), QFilters(), Budget(tokens=9), calibration=drawn(1, 2, 3, 5, 12))
    with pytest.raises(ConfigError, match="group must be one of max, mean, got 'sum'"):
        TriAttention(group="sum")
    for nothing in ([], [[]]):
        with pytest.raises(ConfigError, match="at least one sequence, and a token in each"):
            calibrate_queries(tiny("llama"), nothing)
    with pytest.raises(CacheError, match="one sequence: rows cannot be reordered"):
        CalibrationLayer().select_rows(torch.tensor([0]))
    with pytest.raises(ConfigError, match="--model_args cannot give: use kvexp run task=lm_eval method=qfilters"):
        ModelArguments.of("qfilters", 0.5, "generate", {})


def test_forks_share_it_and_methods_without_the_need_hold_none() -> None:
    given = calibration("llama")
    cache = EvictionCache(tiny("llama"), QFilters(), Budget(tokens=5), calibration=given)
    with torch.no_grad():
        tiny("llama")(torch.arange(9)[None], past_key_values=cache)
    pairs = zip(cache.layer_states, cache.fork([0]).layer_states, strict=True)
    assert all(mine.calibration is not None and mine.calibration is its.calibration for mine, its in pairs)
    plain = EvictionCache(tiny("llama"), KNorm(), Budget(tokens=5), calibration=given)
    assert all(state.calibration is None for state in plain.layer_states)


# -- the file ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "calibration"


def test_a_file_is_read_as_it_was_written_and_by_its_model_alone(cache: Path) -> None:
    made = drawn(1, 2, 3, 5, 14)
    assert QUERIES.read("some model") is None
    file = QUERIES.write(made, "some model", {"data": "texts"})
    assert file.parent == cache and list(cache.glob("[!.]*")) == [file]
    found = QUERIES.read("some model")
    assert found == made
    assert all(torch.equal(getattr(found, name), getattr(made, name)) for name in ("direction", "mean", "size"))
    assert QUERIES.read("another model") is None
    other = QUERIES.path("another model")
    other.write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match="was written for another model"):
        QUERIES.read("another model")


def test_a_torn_or_changed_file_is_never_used(cache: Path) -> None:
    file = QUERIES.write(drawn(1, 2, 3, 5, 14), "some model", {})
    content = file.read_bytes()
    for torn in (b"", content[:40], content[:-1]):
        file.write_bytes(torn)
        with pytest.raises(ConfigError, match="is no calibration"):
            QUERIES.read("some model")
    flipped = bytearray(content)
    flipped[-3] ^= 1
    file.write_bytes(flipped)
    with pytest.raises(ConfigError, match="changed since"):
        QUERIES.read("some model")


def test_a_write_that_fails_leaves_the_old_file_and_no_other(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = drawn(1, 2, 3, 5, 14), drawn(2, 2, 3, 5, 14)
    file = QUERIES.write(old, "some model", {})

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"No space left on device.*make room, or set KVEXP_CACHE"):
        QUERIES.write(new, "some model", {})
    assert QUERIES.read("some model") == old and list(cache.glob("[!.]*")) == [file]


# -- the command and its runs ------------------------------------------------------------------------------------------


def settings(*words: str):
    config, choices = composed("method=qfilters", "kv_ratio=0.3", *words)
    return settings_of(config, choices, small(*words))


def test_without_a_calibration_a_run_is_refused_with_the_command_to_run(cache: Path) -> None:
    with pytest.raises(ConfigError) as error:
        settings("model.seed=5")
    words = str(error.value)
    assert words.startswith(
        "method=qfilters needs statistics of the model's queries from a calibration pass: this model"
    )
    assert words.endswith("has none yet. Run: kvexp calibrate model=tiny model.seed=5")
    command = words.partition("kvexp calibrate ")[2].split()
    assert main([*command, "tokens=32", "sequences=1"]) == 0
    assert settings("model.seed=5").cache.calibration is not None
    with pytest.raises(ConfigError, match="has none yet"):
        settings("model.seed=6")
    (file,) = cache.glob("queries*.safetensors")
    file.write_bytes(b"torn")
    with pytest.raises(ConfigError, match=r"is no calibration .* Run: kvexp calibrate model=tiny model\.seed=5"):
        settings("model.seed=5")


def test_its_digest_is_in_identity_and_rows_of_methods_that_need_it(cache: Path, tmp_path: Path) -> None:
    assert main(["model=tiny", "tokens=32", "sequences=1"]) == 0
    one = settings(f"outputs_dir={tmp_path}", "limit=1")
    digest = one.identity["method"]["calibration"]
    (row,) = evaluate_run(one).rows()
    assert row["calibration"] == digest == one.cache.calibration.digest and len(digest) == 16
    assert "calibration" not in one.baseline().identity["method"]
    assert main(["model=tiny", "tokens=48", "sequences=2"]) == 0
    other = settings(f"outputs_dir={tmp_path}", "limit=1").identity
    assert other["method"].pop("calibration") != digest
    assert other == {**one.identity, "method": other["method"]}


def test_a_calibration_is_known_by_the_weights_whatever_their_dtype(cache: Path) -> None:
    models = [settings_of(*composed("method=h2o", "kv_ratio=0.3", *words)).model for words in
              ([], ["model.dtype=bfloat16"], ["model.seed=3"])]  # fmt: skip
    first, cast, other = (model_digest(model) for model in models)
    assert first == cast != other


def test_a_hub_model_is_known_by_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    commits = {("org/name", None): "abc", ("org/name", "v1"): None}
    monkeypatch.setattr(calibrated, "cached_commit", lambda *asked: commits[asked])
    newest = ModelSpec("pretrained", path="org/name")
    assert model_digest(newest) == "hub org/name abc"
    assert model_digest(replace(newest, revision="v1")) == "hub org/name v1"  # not fetched yet
    commits["org/name", None] = "def"
    assert model_digest(newest) == "hub org/name def"
    assert model_digest(replace(newest, contents=("0123456789abcdef", None))) == "0123456789abcdef"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["method=h2o"], "method=h2o: kvexp calibrate takes model=NAME, model.SETTING=…, data, tokens, sequences"),
        (["model=tiny", "tokens=0"], "tokens must be a whole number of at least 1, got '0'"),
        (["model=tiny", "sequences=many"], "sequences must be a whole number of at least 1, got 'many'"),
        (["model=tiny", "tokens=1"], "tokens must be at least 2, got 1"),
        (["model=tiny", "data=missing.txt"], "data=missing.txt: cannot read it: No such file or directory"),
    ],
)
def test_what_the_command_cannot_do_is_told(
    words: list[str], why: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert why in capsys.readouterr().err
    assert not cache.exists()


@pytest.mark.parametrize("words", [["calibrate"], ["training", "kvzap"]], ids=" ".join)
def test_an_interrupted_pass_ends_in_words(
    words: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(model_calibration, "calibrate_model", interrupted)
    monkeypatch.setattr(kvzap_training, "train_kvzap", interrupted)
    command = main if words == ["calibrate"] else training
    assert command([*words[1:], "model=tiny"]) == 130
    assert "interrupted: nothing was kept of this" in capsys.readouterr().err and not cache.exists()


def test_the_command_reads_a_file_of_texts(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n\n" for text in ("one text", "and another")), "utf-8")
    assert main(["model=tiny", f"data={file}", "tokens=8"]) == 0
    assert "tiny has read 24 tokens of texts.jsonl" in capsys.readouterr().out  # 21 bytes, a start to each 7


def test_triattentions_file_is_taken(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tiny.pt"
    assert main(["model=tiny", "tokens=32", "sequences=2"]) == 0

    def of(method: str):
        return settings_of(*composed(f"method={method}", "kv_ratio=0.3"), small()).cache.calibration

    made = of("triattention")
    pairs = made.mean.flatten(1, 2).unflatten(-1, (2, -1))
    torch.save({"E_q": torch.complex(*pairs.unbind(-2)), "E_q_norm": made.size.flatten(1, 2)}, file)
    assert main(["model=tiny", "--from", str(file)]) == 0
    taken = of("triattention")
    assert torch.equal(made.mean, taken.mean) and torch.equal(made.size, taken.size) and made.digest != taken.digest
    with pytest.raises(ConfigError, match="qfilters needs directions of the model's queries"):
        of("qfilters")
    assert main(["model=tiny", "--from", str(tmp_path / "none.pt")]) == 2
    assert "there is no file" in capsys.readouterr().err


def test_texts_are_of_a_file_or_kvexps_own(tmp_path: Path) -> None:
    own = calibration_texts("")
    assert own.name == "kvexp's 36 articles" and len(own.texts) == 36
    plain = tmp_path / "plain.txt"
    plain.write_text("one\ntext", "utf-8")
    assert calibration_texts(str(plain)).texts == ("one\ntext",)
    for content, why in (
        ('{"words": 1}', "line 1 of data=.* is no JSON object with a field text"),
        ('\n{"text": 1}', "line 2 of data=.*: text must be a text, got 1"),
        ("", "has no text in it"),
    ):
        rows = tmp_path / "rows.jsonl"
        rows.write_text(content, "utf-8")
        with pytest.raises(ConfigError, match=why):
            calibration_texts(str(rows))
    plain.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        calibration_texts(str(plain))


def test_texts_are_joined_and_cut_into_sequences_of_one_length() -> None:
    tokenizer = byte_tokenizer()
    start = tokenizer.bos_token_id
    cut = sequences_of(["abc", "defg"], tokenizer, 4, 9)  # a b c \n \n d e f g: three threes
    assert [tokenizer.decode(ids[1:]) for ids in cut] == ["abc", "\n\nd", "efg"]
    assert all(ids[0] == start and len(ids) == 4 for ids in cut)
    assert sequences_of(["abc", "defg"], tokenizer, 4, 2) == cut[:2]
    assert [len(ids) for ids in sequences_of(["abc"], tokenizer, 99, 2)] == [4]


# The testbed's trained models as they lie in the checkout, and the experiment that scores them.


MODELS = Path(__file__).resolve().parents[2] / "kvexp" / "tasks" / "testbed_models"
TRAINED = sorted(path.name for path in MODELS.glob("testbed_*") if (path / "model.safetensors").exists())


def test_four_families_are_there():
    assert TRAINED == ["testbed_alibi", "testbed_gqa", "testbed_learned", "testbed_rope"]


@pytest.mark.parametrize("name", TRAINED)
def test_models_are_small_and_documented(name):
    assert sum(file.stat().st_size for file in (MODELS / name).iterdir()) <= 8e6
    facts = json.loads((MODELS / name / "training.json").read_text())
    assert facts["steps"] > 1000 and min(facts["validation_recall"].values()) > 0.85
    log = [json.loads(line) for line in (MODELS / name / "training.jsonl").read_text().splitlines()]
    assert log[-1]["step"] == facts["steps"]


@pytest.mark.parametrize("name", TRAINED)
def test_models_summarize_unseen_documents(name):
    """A few documents: the scores that the cards claim come from experiments/testbed.py."""
    from kvexp.generate import GenerationParams, generate
    from kvexp.hf import load_model, load_tokenizer
    from kvexp.methods import Full

    model, tokenizer = load_model(str(MODELS / name)), load_tokenizer(str(MODELS / name))
    task = TestbedSummary(limit=6)
    examples = list(task.examples())
    prompts = [tokenizer(example.prompt).input_ids for example in examples]
    made = generate(model, prompts, Full(), decoding=GenerationParams(max_new_tokens=48), tokenizer=tokenizer)
    scores = [
        task.score(tokenizer.decode(tokens, skip_special_tokens=True), example.reference, example)["rouge2"]
        for tokens, example in zip(made.tokens, examples, strict=True)
    ]
    assert sum(scores) / len(scores) > 70


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A folder of models that may be changed, in place of kvexp's own; what would be run is listed and not run."""
    shutil.copytree(MODELS / "testbed_rope", tmp_path / "models" / "testbed_rope")
    monkeypatch.setattr(testbed, "FOLDER", tmp_path / "models")
    ran = []
    monkeypatch.setattr(testbed.subprocess, "run", lambda line, **_: ran.append(line))
    monkeypatch.setattr(testbed, "table", lambda folder, _: folder)
    return ran


def test_weights_trained_again_are_measured_apart(copy, tmp_path):
    """Their runs have the same labels as those of the weights before: a table of both would show either."""
    before = testbed.measure("testbed_rope", tmp_path / "outputs", 60)
    assert testbed.measure("testbed_rope", tmp_path / "outputs", 60) == before
    assert all(f"outputs_dir={before}" in line for line in copy)
    assert testbed.measure("testbed_rope", tmp_path / "outputs", 30) != before
    with (tmp_path / "models" / "testbed_rope" / "model.safetensors").open("ab") as weights:
        weights.write(b"x")
    assert testbed.measure("testbed_rope", tmp_path / "outputs", 60) != before


def test_a_table_of_scores_holds_them_to_the_claims():
    rows = [{"task": "testbed_summary", "method": "full", "kv_ratio": None, "rouge2": 90.0}]
    rows += [{"task": "testbed_summary", "method": "window", "kv_ratio": 0.5, "rouge2": 50.0}]
    text = testbed.markdown(pd.DataFrame(rows), 60)
    assert "| ROUGE-2 points that window loses at kv_ratio 0.5 | 40.0 | >= 25 |" in text
    assert "| summary, ROUGE-2 | 90.0 | >= 80 |" in text
