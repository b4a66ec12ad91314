"""No memory: batches and groups are halved, what fails alone is a row that says why, and the rest goes on."""

import pytest

from faults.sweeps import METHODS, folder_of, rows_of, sweep
from kvexp.results.table import table
from kvexp.results.views import main as results

# A forward of more than one row finds no memory, in the words of CUDA's allocator.
SHORT = """
import torch
import kvexp.hf.load as load
patch = load.patch_model
def patch_model(model, **options):
    model = patch(model, **options)
    def hook(module, args, kwargs):
        if args[0].shape[0] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
    model.register_forward_pre_hook(hook, with_kwargs=True)
    return model
load.patch_model = patch_model
"""
BATCHED = ("receipt", "halved")  # bytes, batch size and the last digits of what was attended to


@pytest.fixture
def truth(undisturbed):
    """Rows where nothing was short."""
    return rows_of(undisturbed, *BATCHED)


def test_a_run_without_room_for_the_full_cache_beside_it_has_rows_and_no_divergence(stage, tmp_path, truth):
    """A text is forced on a run and on the full cache, two rows: where one fits, the rows are made and this is said."""
    out = tmp_path / "out"
    code, said = stage.run(sweep(out, launcher="shared_prefill"), tmp_path / "log", SHORT)
    assert code == 0, said
    assert rows_of(out, *BATCHED) == truth
    for method in ("h2o", "keyformer"):
        assert f"divergence of {method} 0.3 task.max_new_tokens=6: 3 KL passes were not made" in said


# One example's prompt is too much in any company.
BAD = """
import torch
import kvexp.run.answers as answers
import kvexp.generate as generate
def poisoned(name):
    good = getattr(generate, name)
    def called(model, *args, **options):
        prompts = args[0]
        if BEFORE and any(len(ids) == LENGTH for ids in prompts):
            raise torch.OutOfMemoryError('CUDA out of memory')
        return good(model, *args, **options)
    return called
BEFORE = True
generate.generate, generate.prefill_together = poisoned("generate"), poisoned("prefill_together")
"""


@pytest.mark.parametrize(("launcher", "size"), [("shared_prefill", 3), ("basic", 1)])
def test_one_example_fails_and_the_rest_goes_on(stage, tmp_path, truth, launcher, size):
    out, word = tmp_path / "out", f"batch_size={size}"
    bad = next(row for row in truth["full"].values() if row["index"] == 1)
    before = BAD.replace("LENGTH", str(bad["prompt_tokens"]))
    code, said = stage.run(sweep(out, word, launcher=launcher), tmp_path / "log", before)
    assert code == 0, said
    reason = "out of memory, alone"
    for method in METHODS:
        failed, *others = sorted(rows_of(out, *BATCHED)[method].values(), key=lambda row: row["index"] != 1)
        assert (failed["failed"], failed["metrics"]) == ("memory", {})
        assert failed["skipped"] == f"{reason}; retry=true tries again"
        assert {row["example"]: row for row in others} == {
            name: row for name, row in truth[method].items() if name != bad["example"]
        }
    shown = table(out)
    assert list(shown["skipped"]) == [1, 1, 1] and reason in shown["unscored"][0]
    files = {method: folder_of(out, method) / "examples.jsonl" for method in METHODS}
    lines = {method: file.read_bytes() for method, file in files.items()}

    code, said = stage.run(sweep(out, word, launcher=launcher), tmp_path / "log2")
    assert code == 0 and all(lines[method] == file.read_bytes() for method, file in files.items()), "it stays so"
    code, said = stage.run(sweep(out, word, "retry=true", launcher=launcher), tmp_path / "log3")
    assert code == 0, said
    assert rows_of(out, *BATCHED) == truth, "until it is to be tried again"
    assert list(table(out)["skipped"]) == [0, 0, 0]


def test_the_processor_really_runs_out_of_memory(stage, tmp_path, truth, capsys):
    """The kernel's limit on the process: a row of a forward takes 64 MiB, and there is room for one and a half."""
    out = tmp_path / "out"
    code, said = stage.run(sweep(out, "batch_size=3"), tmp_path / "log", ADDRESSES)
    assert code == 0, said
    assert "REFUSED" in said and "allocate" in said, "it was the allocator that said no"
    assert rows_of(out, *BATCHED) == truth, "the same answers, alone"
    for rows in rows_of(out).values():
        assert [row["halved"] for row in rows.values()] == [1, 2, 2], "3 rows are 1 and 2, which are 1 and 1"
        assert [row["receipt"]["batch_size"] for row in rows.values()] == [1, 1, 1]
    shown = table(out)
    assert list(shown["halved"]) == [3, 3, 3] and list(shown["skipped"]) == [0, 0, 0]
    assert results([str(out), "--full"]) == 0
    assert "hal-" in capsys.readouterr().out, "the full table has a column for it"


ADDRESSES = """
import resource, torch
import kvexp.hf.load as load
patch = load.patch_model
def patch_model(model, **options):
    model = patch(model, **options)
    def hook(module, args, kwargs):
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (96 << 20), resource.RLIM_INFINITY))
        try:
            torch.empty(args[0].shape[0], 64 << 20, dtype=torch.uint8)
        except RuntimeError as error:
            print("REFUSED", error, flush=True)
            raise
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    model.register_forward_pre_hook(hook, with_kwargs=True)
    return model
load.patch_model = patch_model
"""
