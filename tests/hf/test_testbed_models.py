"""The testbed's trained models as they lie in the checkout, and the experiment that scores them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from experiments import testbed
from kvexp.tasks import TestbedSummary

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


@pytest.mark.parametrize("name", TRAINED)
def test_cards_say_what_was_trained_and_measured(name):
    card, facts = (MODELS / name / "README.md").read_text(), json.loads((MODELS / name / "training.json").read_text())
    assert card.startswith(f"# {name}\n") and f"| {facts['steps']:,}, about" in card and facts["device"] in card
    for kind, value in facts["validation_recall"].items():
        assert f"| {kind} | {100 * value:.1f} |" in card
    for claim in testbed.CLAIMS:
        assert f"| {claim.words} |" in card
    assert "nan" not in card


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


def test_a_card_is_written_with_the_scores_and_again(copy):
    rows = [{"task": "testbed_summary", "method": "full", "kv_ratio": None, "rouge2": 90.0}]
    rows += [{"task": "testbed_summary", "method": "window", "kv_ratio": 0.5, "rouge2": 50.0}]
    text = testbed.markdown(pd.DataFrame(rows), 60)
    assert "| ROUGE-2 points that window loses at kv_ratio 0.5 | 40.0 | >= 25 |" in text
    for scores in ("old scores", text):
        testbed.into_card("testbed_rope", scores)
    card = (testbed.FOLDER / "testbed_rope" / "README.md").read_text()
    assert card.count("| summary, ROUGE-2 | 90.0 | >= 80 |") == 1 and "old scores" not in card
    assert (
        "python -m experiments.studies.testbed train testbed_rope" in card and "conclusions about the order of" in card
    )
