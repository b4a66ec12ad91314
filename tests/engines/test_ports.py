"""The test that docs/ports.md gives to engines: right ports pass it, a wrong one is told what it breaks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy_ports
import pytest
from pages import ROOT, files
from tiny import prompts_of
from transformers import AutoModelForCausalLM

from kvexp.core import Budget, CacheConfig
from kvexp.diagnose.case import Case
from kvexp.engines import trace_check
from kvexp.engines.trace import trace_of, write_trace
from kvexp.generate import GenerationParams
from kvexp.hf import patch_model
from kvexp.methods import H2O, TOVA, KeyDiff, StreamingLLM

MODEL = ROOT / "kvexp" / "tasks" / "testbed_models" / "testbed_gqa"
PORTED = [(StreamingLLM(), "per_head"), (H2O(), "per_head"), (KeyDiff(protect_recent=0), "append_only")]
OTHERS = [(StreamingLLM(), "paged"), (H2O(), "paged"), (TOVA(), "union")]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """An engine's repository: the page's test, the checker, an adapter, and traces of two texts for every port."""
    folder = tmp_path_factory.mktemp("repository")
    for name, text in files(ROOT / "docs" / "ports.md").items():
        (folder / name).write_text(text, "utf-8")
    shutil.copy(trace_check.__file__, folder)
    shutil.copy(numpy_ports.__file__, folder / "my_engine.py")
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32").eval()
    patch_model(model)
    for method, profile in PORTED + OTHERS:
        for number, prompt in enumerate(prompts_of(5, [150, 101])):
            cache = CacheConfig(method, Budget(tokens=32, counts_self=False), positions="original")
            case = Case(model, prompt, [], cache, GenerationParams(max_new_tokens=5, eos=None), seed=3)
            file = folder / "traces" / f"{method.name}_{profile}_{number}.npz"
            write_trace(trace_of(case, profile, 5, {"name": "testbed_gqa"}), file)
    return folder


def run_pasted_test(folder: Path, chosen: str, **environment: str) -> tuple[list[str], str]:
    """The page's tests that fail, and all that pytest prints, where neither torch nor kvexp can be imported."""
    code = (
        "import sys, pytest\nsys.modules.update(dict.fromkeys(('torch', 'kvexp', 'transformers'), None))\n"
        f"sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-k', {chosen!r}, 'test_port.py']))"
    )
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FAULT", "PYTEST_ADDOPTS")}
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "MODEL": str(MODEL), "COLUMNS": "200"} | environment
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return re.findall(r"^FAILED test_port.py::test_(\w+)\[", done.stdout, re.MULTILINE), done.stdout


def test_three_published_rules_in_numpy_keep_what_kvexp_keeps(repository):
    chosen = " or ".join(f"{method.name}_{profile}" for method, profile in PORTED)
    failed, printed = run_pasted_test(repository, chosen)
    assert not failed and "18 passed" in printed


WRONG = {  # fault: the port that has it, its tests that fail, what they say
    "positions": ("h2o", ["it_keeps", "1_positions"], "1 true position: step 0 wrote position [32], not 150"),
    "sinks": ("streaming_llm", ["2_sinks"], "2 sinks: in chunks, (step, layer, head) (-1, 0, 0) lacks {0, 1, 2, 3}"),
    "budget": ("keydiff", ["3_chunks"], "3 budget: in chunks, (step, layer, head) (-1, 0, 0) holds 64"),
    "state": ("h2o", ["4_a_request"], "4 state: after another request, after the prompt, layer 0, head 0: lacks [16,"),
    "batch": ("h2o", ["5_a_batch"], "5 batch: with another request, after the prompt, layer 0, head 0: lacks []"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_port_is_told_which_invariant_it_breaks(repository, fault):
    port, broken, said = WRONG[fault]
    failed, printed = run_pasted_test(repository, f"{port} and (per_head or append_only)", FAULT=fault)
    assert [name for name in failed if not name.startswith(tuple(broken))] == [] and len(failed) == len(broken)
    assert said in printed
    assert fault != "state" or said in (ROOT / "docs" / "ports.md").read_text("utf-8")


def test_memory_that_drops_pages_or_whole_tokens_passes(repository, tmp_path):
    """The reference's own traces as an engine's, for profiles that no port here has."""
    shutil.copytree(repository, tmp_path, dirs_exist_ok=True)
    (tmp_path / "my_engine.py").write_text("def start(header): return lambda texts, chunk=None: texts\n", "utf-8")
    failed, printed = run_pasted_test(tmp_path, "paged or union")
    assert not failed and "18 passed" in printed
