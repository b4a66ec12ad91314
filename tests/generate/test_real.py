"""A slice of a real language model: SmolLM2-135M-Instruct, where `make setup` or `kvexp fetch` has put it.

Nothing here fetches. Without the weights these tests skip with a reason; where KVEXP_REQUIRE_REAL=1, as CI sets it,
they fail.
"""

from __future__ import annotations

import json
import signal
import time

import pytest
import torch
from commands import run_py

from kvexp.core import Budget, CacheConfig, Quantization
from kvexp.generate import GenerationParams, divergence_from_full, generate, prefill, prefill_together
from kvexp.hf import load_model, load_tokenizer
from kvexp.methods import H2O, Full, Window
from kvexp.results.views import main as results
from kvexp.run.prompts import in_template
from kvexp.run.store import runs
from kvexp.tasks.articles import articles

pytestmark = pytest.mark.real
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
SUMMARY = f"Summarize the following news article:\n\n{articles()[0].text}\n\n"


@pytest.fixture(scope="module")
def model(smollm2):
    return load_model(smollm2)


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return load_tokenizer(smollm2)


def ids_of(tokenizer, words):
    return tokenizer(in_template(tokenizer, words), add_special_tokens=False).input_ids


def test_it_is_the_model_it_says_it_is(model):
    config = model.config
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008  # the head is the embedding's own
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert config.max_position_embeddings == 8192 and model.dtype == torch.float32


def test_it_reads_its_template_and_its_digits(tokenizer):
    text = in_template(tokenizer, "Hello")
    turns = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert text == turns
    ids = tokenizer("  2023", add_special_tokens=False).input_ids
    assert [tokenizer.decode([token]) for token in ids] == ["  ", "2", "0", "2", "3"]


def test_it_knows_a_capital_and_when_to_stop(model, tokenizer):
    answer = generate(model, [ids_of(tokenizer, "What is the capital of France?")], Full(), tokenizer=tokenizer)
    text = tokenizer.decode(answer.tokens[0])
    assert "Paris" in text and text.endswith("<|im_end|>")


def test_with_nothing_evicted_its_tokens_are_hugging_faces(model, tokenizer):
    """Two prompts of different length in one batch, against the model's own generate with its own cache."""
    prompts = [ids_of(tokenizer, SUMMARY), ids_of(tokenizer, "Name three colours.")]
    few = GenerationParams(max_new_tokens=12)
    ours = generate(model, prompts, H2O(), Budget(kv_ratio=1.0), tokenizer=tokenizer, decoding=few)
    for prompt, tokens in zip(prompts, ours.tokens, strict=True):
        ids = torch.tensor([prompt])
        own = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert list(tokens) == own[0, len(prompt) :].tolist()


def test_heavy_hitters_stay_nearer_to_the_full_cache_than_a_window(model, tokenizer):
    """At half the cache, along the full cache's own answer: the order of the papers."""
    prompt = [ids_of(tokenizer, SUMMARY)]
    variants = [prefill(model, prompt, method, Budget(kv_ratio=0.5)) for method in (H2O(), Window())]
    h2o, window = divergence_from_full(model, prefill(model, prompt, Full()), variants, max_new_tokens=16)
    mean = {name: sum(row.kl[1:]) / len(row.kl[1:]) for (row,), name in ((h2o, "h2o"), (window, "window"))}
    assert h2o[0].kl[0] < 1e-3  # the prefill is full
    assert 0.01 < mean["h2o"] < mean["window"] / 2, mean


def test_a_run_says_what_the_model_is_and_how_answers_ended(smollm2, tmp_path, monkeypatch, capsys):
    words = ("model=smollm2_135m", "task=sample", "limit=1", "task.max_new_tokens=16", f"outputs_dir={tmp_path}")
    code, _, err = run_py(monkeypatch, capsys, *words)
    assert code == 0, err
    assert results([str(tmp_path), "--full"]) == 0
    out = capsys.readouterr().out
    assert "smollm2_135m / sample, Q4_1 weights, chat template" in out and "ended" in out
    files = [file.read_text("utf-8").splitlines() for file in tmp_path.glob("*/examples.jsonl")]
    rows = [json.loads(line) for lines in files for line in lines]
    assert len(rows) == 2  # h2o's and its baseline's
    for row in rows:
        assert row["chat_template"] is True and row["weights"]["quantisation"] == "Q4_1"
        assert len(row["output"].split()) > 4


def test_a_sweep_that_is_killed_keeps_its_rows_and_goes_on_to_the_same(smollm2, stage, tmp_path):
    """Rows and divergences to the bit, although what decodes together is another."""

    def words(name):
        asked = ("method=h2o,keyformer", "kv_ratio=0.2,0.5", "limit=2", "task.max_new_tokens=24")
        return ("-m", *asked, f"outputs_dir={tmp_path / name}")

    def rows(name):
        found = {
            (run.hash, row["example"]): {key: value for key, value in row.items() if key not in ("seconds", "halved")}
            for run in runs(tmp_path / name)
            for row in run.rows()
        }
        return found, {(run.hash, key): line for run in runs(tmp_path / name) for key, line in run.divergence().items()}

    rows_of_a_step = "import kvexp.run.batches as batches\nbatches.MAX_UNWRITTEN_ROWS = {}\n"
    child = stage.start(words("killed"), tmp_path / "log", rows_of_a_step.format(2))
    end = time.monotonic() + 240
    while not (tmp_path / "killed").is_dir() or not rows("killed")[0]:
        assert child.poll() is None and time.monotonic() < end, child.said
        time.sleep(0.1)
    child.send(signal.SIGKILL)
    child.wait()
    kept = len(rows("killed")[0])
    assert 0 < kept < 10
    for name, most in (("killed", 2), ("whole", None)):
        code, said = stage.run(words(name), tmp_path / "log2", rows_of_a_step.format(most))
        assert code == 0, said
    assert rows("killed") == rows("whole") and len(rows("whole")[0]) == 10 and len(rows("whole")[1]) == 8


@pytest.mark.slow
def test_a_sweep_that_is_interrupted_has_the_rows_of_every_finished_prompt(smollm2, stage, tmp_path):
    """At four moments of the command of ten runs; gone on with, it ends with the rows of one that was left alone."""
    report = """
import kvexp.generate, os
decode = kvexp.generate.decode_batches
def reporting(*given, **named):
    made = decode(*given, **named)
    os.write(1, f"DECODED {sum(map(len, given[1]))}\\n".encode())
    return made
kvexp.generate.decode_batches = reporting
"""

    def words(name):
        asked = ("method=keyformer,h2o,a2sf", "kv_ratio=0.2,0.5,0.7", "limit=6", "task.max_new_tokens=24")
        return ("-m", *asked, f"outputs_dir={tmp_path / name}")

    def rows(name):
        left_out = ("seconds", "halved")
        return {
            (run.hash, row["example"]): {key: value for key, value in row.items() if key not in left_out}
            for run in runs(tmp_path / name)
            for row in run.rows()
        }

    start = time.monotonic()
    code, said = stage.run(words("whole"), tmp_path / "log", report)
    seconds = time.monotonic() - start
    assert code == 0, said
    whole = rows("whole")
    assert len(whole) == 60
    for share in (0.2, 0.4, 0.6, 0.8):
        child = stage.start(words(f"{share}"), tmp_path / f"log{share}", report)
        time.sleep(share * seconds)
        child.send(signal.SIGINT)
        assert child.wait() in (0, 130)
        decoded = [int(line.split()[1]) for line in child.said.splitlines() if line.startswith("DECODED")]
        made = len(rows(f"{share}"))  # what was decoded in the moment of the interrupt may not be written
        assert made in (sum(decoded), sum(decoded[:-1])) and (made >= 10 or share < 0.5), child.said
        assert all(whole[key] == row for key, row in rows(f"{share}").items())
    code, said = stage.run(words("0.8"), tmp_path / "log2")
    assert code == 0 and rows("0.8") == whole, said


# Quantised slots of a real language model, where `kvexp fetch` has put it: few bits beside the full cache.


NEW = 12


@pytest.mark.slow
def test_fewer_bits_diverge_more_and_eight_hardly(smollm2):
    """One article's first words; eight bits are nearer to the full cache than half of its tokens are."""
    model, tokenizer = load_model(smollm2), load_tokenizer(smollm2)
    words = in_template(tokenizer, f"Summarize the following news article:\n\n{articles()[0].text[:2000]}\n\n")
    ids = tokenizer(words, add_special_tokens=False).input_ids
    variants = {bits: CacheConfig(Full(), quantization=Quantization(bits, bits)) for bits in (8, 4, 2)}
    variants["h2o"] = CacheConfig(H2O(), Budget(kv_ratio=0.5))
    contexts = prefill_together(model, [ids], [CacheConfig(Full()), *variants.values()], max_new_tokens=NEW)
    full = contexts[0].cache.memory_tracker.bytes
    held = {name: each.cache.memory_tracker.bytes / full for name, each in zip(variants, contexts[1:], strict=True)}
    found = divergence_from_full(model, contexts[0], contexts[1:], max_new_tokens=NEW)
    kl = {name: sum(text.kl[1:]) / len(text.kl[1:]) for name, (text,) in zip(variants, found, strict=True)}
    assert 0 < kl[8] < kl[4] < kl[2] and kl[8] < 0.001 and kl[8] < kl["h2o"]
    assert held[2] < held[4] < held[8] < 0.6  # of float32, with the window in full precision
