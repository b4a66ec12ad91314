"""Before the first example that is timed, something like it is generated that no row tells of."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_conf import composed
from test_runner import settings

import kvexp.generate
from kvexp import util as free_memory
from kvexp.run.batches import NEW, PROMPT, evaluate_run
from kvexp.run.settings import settings_of
from kvexp.util import UNKNOWN, available

# Before the first example that is timed, something like it is generated that no row tells of.


@pytest.fixture
def calls(monkeypatch):
    """(prompt lengths, method, max_new_tokens) of every generation."""
    made, generate = [], kvexp.generate.generate

    def watched(model, prompts, cache, *, decoding, **rest):
        made.append(([len(ids) for ids in prompts], cache.method.name, decoding.max_new_tokens))
        return generate(model, prompts, cache, decoding=decoding, **rest)

    monkeypatch.setattr(kvexp.generate, "generate", watched)
    return made


def test_each_run_warms_up_once_under_its_own_method(tmp_path, calls):
    record = evaluate_run(settings(tmp_path, "limit=3", "batch_size=2", "kv_ratio=0.3", "generation=beam4"))
    assert [(method, new) for _, method, new in calls] == [
        *(("full", NEW), ("full", 4), ("full", 4)),
        *(("h2o", NEW), ("h2o", 4), ("h2o", 4)),
    ]
    assert calls[0][0] == [PROMPT, PROMPT] and min(calls[1][0]) > PROMPT
    rows = record.rows()
    assert [row["example"] for row in rows] == ["sample-0", "sample-1", "sample-2"]
    assert all(row["seconds"]["ttft"] > 0 for row in rows)
    calls.clear()
    evaluate_run(settings(tmp_path, "limit=3", "batch_size=2", "kv_ratio=0.3", "generation=beam4"))
    assert calls == [], "a run with all rows"


def test_rows_are_the_same_without(tmp_path, monkeypatch):
    words = ("limit=2", "kv_ratio=0.3", "generation=sampling", "method=keyformer")

    def rows(name):
        return [
            {k: v for k, v in row.items() if k != "seconds"}
            for row in evaluate_run(settings(tmp_path / name, *words)).rows()
        ]

    with_it = rows("with")
    monkeypatch.setattr("kvexp.run.batches.warm_up", lambda *_: None)
    assert rows("without") == with_it


def test_a_budget_that_so_few_tokens_cannot_hold(tmp_path, calls):
    """0.03 of 128 tokens are three slots, fewer than the sinks; of the whole prompt they are enough."""
    record = evaluate_run(settings(tmp_path, "limit=1", "method=streaming_llm", "kv_ratio=0.03"))
    assert [method for _, method, _ in calls] == ["full", "full", "streaming_llm", "full", "streaming_llm"]
    assert record.rows()[0]["receipt"]["first_eviction_step"] == 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), RuntimeError("something else")])
def test_what_goes_wrong_is_left_to_the_run(tmp_path, monkeypatch, error):
    def fails(*_):
        raise error

    monkeypatch.setattr("kvexp.run.batches._generate_few", fails)
    assert evaluate_run(settings(tmp_path, "limit=1")).finished


def test_choices_hold_no_times_and_need_none(tmp_path, calls):
    words = composed("model=testbed_rope", "task=testbed_choice", "limit=1", f"outputs_dir={tmp_path}")
    assert evaluate_run(settings_of(*words)).finished
    assert calls == []


# Free memory is the least of what the computer, the process's limit and the control groups around it leave.


GIB = 1 << 30
V1, V2 = "1:name=systemd:/\n4:cpu,memory:/jobs/mine\n", "0::/jobs/mine\n"


@pytest.fixture
def system(tmp_path, monkeypatch):
    """write(path, text) under a /proc and a /sys/fs/cgroup of our own; the computer has 64 GiB left."""
    monkeypatch.setattr(free_memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(free_memory, "CGROUPS", tmp_path / "cgroup")

    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(text))

    write("proc/meminfo", f"MemTotal: {99 << 20} kB\nMemAvailable: {64 << 20} kB\n")
    return write


def group(write, version, path, limit, taken, cached=0):
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}[version]
    root = "cgroup" + ("/memory" if version == 1 else "") + path
    write(f"{root}/{names[0]}", f"{limit}\n")
    write(f"{root}/{names[1]}", f"{taken}\n")
    write(f"{root}/memory.stat", f"anon 5\n{'total_' * (version == 1)}inactive_file {cached}\n")


def test_the_computer_alone(system):
    assert available() == 64 * GIB


def test_a_system_that_does_not_tell(tmp_path, monkeypatch):
    monkeypatch.setattr(free_memory, "PROC", tmp_path / "none")
    assert available() == UNKNOWN


@pytest.mark.parametrize(("version", "said"), [(1, V1), (2, V2)])
def test_a_control_group(system, version, said):
    system("proc/self/cgroup", said)
    group(system, version, "/jobs/mine", 8 * GIB, 5 * GIB)
    assert available() == 3 * GIB
    group(system, version, "/jobs/mine", 8 * GIB, 5 * GIB, cached=GIB)
    assert available() == 4 * GIB, "pages of files go first"
    group(system, version, "/jobs", 10 * GIB, 9 * GIB)
    assert available() == GIB, "the group around it is fuller"
    group(system, version, "", 10 * GIB, 11 * GIB)
    assert available() == 0


@pytest.mark.parametrize(("version", "said", "none"), [(1, V1, 9223372036854771712), (2, V2, "max")])
def test_a_control_group_without_a_limit(system, version, said, none):
    system("proc/self/cgroup", said)
    group(system, version, "/jobs/mine", none, 5 * GIB)
    assert available() == 64 * GIB


def test_a_container_that_sees_the_path_of_its_host(system):
    system("proc/self/cgroup", "0::/../kubepods/pod7\n")
    group(system, 2, "", 2 * GIB, GIB)
    assert available() == GIB


def test_a_limit_of_another_controller_is_none_of_memory(system):
    system("proc/self/cgroup", "3:pids:/jobs/mine\n")
    group(system, 1, "/jobs/mine", GIB, 0)
    assert available() == 64 * GIB


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_the_limit_of_the_process():
    """In a process of its own, with room for 300 MiB of addresses more than it has."""
    code = (
        "import resource, runpy\n"
        f"available = runpy.run_path({free_memory.__file__!r})['available']\n"  # without all that the package imports
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20), resource.RLIM_INFINITY))\n"
        "print(available() >> 20)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert 200 < int(done.stdout) <= 300


@pytest.mark.skipif("glibc" not in platform.libc_ver()[0], reason="other allocators have their own way")
def test_what_nothing_holds_goes_back_to_the_system():
    """In a process of its own: 400 MiB in pieces, each below a small one that stays."""
    code = (
        "import torch\n"
        "from kvexp.run.limits import free_memory\n"
        "resident = lambda: int(open('/proc/self/statm').read().split()[1]) * 4 >> 10\n"
        "pieces = [(torch.ones(25_600), torch.ones(64)) for _ in range(4096)]\n"
        "kept = [small for _, small in pieces]\n"
        "del pieces\n"
        "before = resident()\n"
        "free_memory()\n"
        "print(before - resident())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 300
