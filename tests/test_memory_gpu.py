"""On CUDA: what the pretended device's allocator counted on a CPU is what CUDA's caching allocator counts.

The bounds were written without a GPU: what is held between forwards within 1 % and 64 KiB, peaks within a quarter and
1 MiB (kernels of other shapes than the CPU's hold other intermediate results).
"""

import copy
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_device_memory import WIDE, config_for, seen_by
from tiny import stock

from kvexp.models import patch_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
HERE = Path(__file__).resolve().parent
COUNT = """
import dataclasses, json, sys, torch
from test_device_memory import config_for, held_by
print(json.dumps(dataclasses.asdict(held_by(config_for(sys.argv[1]), getattr(torch, sys.argv[2]), block=512))))
"""


class CachingAllocator:
    """CUDA's, as a `FakeAllocator`."""

    before = 0

    @property
    def bytes(self):
        return torch.cuda.memory_allocated() - self.before

    @property
    def peak_bytes(self):
        return torch.cuda.max_memory_allocated() - self.before

    def begin(self):
        gc.collect()
        self.before = torch.cuda.memory_allocated()
        self.reset_peak()

    def reset_peak(self):
        torch.cuda.reset_peak_memory_stats()


def pretended(name, dtype):
    """The fake allocator's numbers, from a process that sees no GPU."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT, name, str(dtype).removeprefix("torch.")],
        cwd=HERE,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["full", "h2o", "keyformer", "snapkv", "window"])
def test_the_fake_allocator_counts_what_the_real_one_does(name, dtype):
    model = patch_model(copy.deepcopy(stock("llama", **WIDE)).to(device="cuda", dtype=dtype))
    seen_by(CachingAllocator(), model, config_for(name))  # libraries take their workspaces
    real, fake = seen_by(CachingAllocator(), model, config_for(name)), pretended(name, dtype)
    print(f"{name}, {dtype}: held {real.held}, fake {fake['held']}; peaks {real.prompt_peak} and {real.step_peak}, ")
    print(f"    fake {fake['prompt_peak']} and {fake['step_peak']}; tracked {real.tracked}")
    assert real.tracked == fake["tracked"] and real.kv == real.tracked[-1]
    for ours, theirs in zip(real.held, fake["held"], strict=True):
        assert ours == pytest.approx(theirs, rel=0.01, abs=64 << 10)
    for peak in ("prompt_peak", "step_peak"):
        assert getattr(real, peak) == pytest.approx(fake[peak], rel=0.25, abs=1 << 20)
