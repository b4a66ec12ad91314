"""kvexp gate on real models: llama-server with four caches, engines in this process, and vLLM where it is."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from llama_package import needs_package

from kvexp.gate.command import main
from kvexp.generate import engine
from kvexp.generate.llama_cpp import NO_ROTATION
from kvexp.hf import load_model, load_tokenizer
from kvexp.tasks.articles import articles

pytestmark = pytest.mark.real
VLLM = os.environ.get("KVEXP_VLLM_URL")  # of a server with the real model in float32 and --max-logprobs -1
FEW = ["share=0.6", "confidence=0.8", "limit=4"]  # the fewest prompts that carry a pass


@pytest.fixture(scope="module")
def gguf(smollm2, tmp_path_factory):
    """The real model with its own tokenizer, in float16: kvexp's files for engines have place holders for tokens."""
    path, tokenizer = tmp_path_factory.mktemp("gguf") / "smollm2.gguf", load_tokenizer(smollm2)

    def vocabulary(writer, count):
        names = {number: token for token, number in tokenizer.get_vocab().items()}
        merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list([names[number] for number in range(count)])
        writer.add_token_types([3 if number in tokenizer.added_tokens_decoder else 1 for number in range(count)])
        writer.add_token_merges([" ".join(pair) for pair in merges])
        writer.add_bos_token_id(tokenizer.bos_token_id)
        writer.add_eos_token_id(tokenizer.eos_token_id)
        writer.add_add_bos_token(False)
        writer.add_chat_template(tokenizer.chat_template)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_place_holders", vocabulary)
        engine.write_gguf(load_model(smollm2), path, np.float16)
    return path


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    words = [f"{article.text[:500]}\n\nIn short:" for article in articles()[:30]]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in words))
    return path


@contextlib.contextmanager
def server(gguf, cache_type, **environment):
    """The URL of a llama-server with this type of cache."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("llama_server.py")
    words = [sys.executable, str(script), str(gguf), str(port), cache_type]
    process = subprocess.Popen(
        words, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None and "listening" in process.stdout.readline()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def baseline(gguf):
    with server(gguf, "f16") as url:
        yield url


def gate(capsys, tmp_path, baseline, candidate, data, *words):
    options = [f"data={data}", f"outputs_dir={tmp_path}", "places=4", "max_tokens=8", "--json"]
    code = main([f"baseline={baseline}", f"candidate={candidate}", *options, *words])
    return code, json.loads(capsys.readouterr().out)


@needs_package
@pytest.mark.parametrize(("cache_type", "low", "high"), [("f16", 0, 0), ("q8_0", 3e-5, 2e-3), ("q4_0", 0.01, 0.1)])
def test_a_llama_server_passes_with_the_kl_of_its_cache(
    gguf, baseline, prompts, tmp_path, capsys, cache_type, low, high
):
    with server(gguf, cache_type) as url:
        code, report = gate(capsys, tmp_path, baseline, url, prompts, *FEW, f"kl={2 * high or 1e-9}")
    assert code == 0, report
    assert low <= report["all"]["kl"] <= high
    assert not any(row["lower_bound"] for row in report["prompts"])


@needs_package
def test_a_planted_fault_fails_by_its_defaults_before_all_prompts_are_read(gguf, baseline, prompts, tmp_path, capsys):
    """Four bits without the rotation that llama.cpp ships: three times the KL."""
    start = time.monotonic()
    with server(gguf, "q4_0", **{NO_ROTATION: "1"}) as url:
        code, report = gate(capsys, tmp_path, baseline, url, prompts)
    print(f"{time.monotonic() - start:.0f} s, {report['measured']} prompts, KL {report['all']['kl']:.3f}")
    assert code == 1 and report["measured"] < report["planned"] == 30
    assert report["all"]["kl"] > 0.07
    assert report["terms"]["kl"] == 0.05 and report["share_high"] < 0.9


@needs_package
def test_chats_and_a_lower_bound_by_the_likeliest_thousand(gguf, baseline, tmp_path, capsys):
    data = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": article.text[:200]} for article in articles()[:2]]
    data.write_text("".join(json.dumps({"messages": [turn]}) + "\n" for turn in turns))
    with server(gguf, "q4_0") as url:
        code, whole = gate(capsys, tmp_path, baseline, url, data)
        _, bound = gate(capsys, tmp_path, baseline, url, data, "top=1000")
    assert code == 3
    assert 0.5 * whole["all"]["kl"] < bound["all"]["kl"] < 1.02 * whole["all"]["kl"]


@needs_package
@pytest.mark.parametrize("first", ["transformers:{model}", "{url}"])
def test_engines_in_this_process_take_the_place_of_a_server(gguf, baseline, smollm2, prompts, tmp_path, capsys, first):
    """In float16 weights and cache, llama.cpp is 4e-6 from transformers (three texts of 1,024 tokens)."""
    place = first.format(model=smollm2, url=baseline)
    code, report = gate(capsys, tmp_path, place, f"llama_cpp:{gguf}?cache_k=f16", prompts, *FEW, "kl=0.001")
    assert code == 0
    assert report["all"]["kl"] < 1e-4


@pytest.mark.servers
@pytest.mark.skipif(not VLLM, reason="KVEXP_VLLM_URL names no vLLM server")
def test_vllm_in_float32_is_transformers(smollm2, prompts, tmp_path, capsys):
    code, report = gate(capsys, tmp_path, f"transformers:{smollm2}", VLLM, prompts, *FEW, "kl=0.001")
    assert code == 0
    assert report["all"]["kl"] < 1e-8
    assert report["candidate"]["kind"] == "vLLM"
