"""Run folders survive kills, full disks, damage and each other, and a run is the same run only if its numbers are."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

import kvexp
from kvexp.run import store
from kvexp.run.store import Run, run_hash, runs
from kvexp.util.errors import ConfigError
from kvexp.util.files import check_writable

ROOT = Path(__file__).resolve().parents[2]
CONFIG: dict[str, Any] = {"model": {"name": "tiny", "layers": 2}, "method": "h2o", "kv_ratio": 0.5, "sizes": [1, 2]}
LABELS = {"model": "tiny", "method": "h2o", "kv_ratio": 0.5}


def row(number: int, output: str = "text") -> dict[str, Any]:
    return {"example": f"e{number}", "index": number, "metrics": {"rouge1": 12.5}, "skipped": None, "output": output}


def ids(run: Run) -> list[str]:
    return [found["example"] for found in run.rows()]


def lines(run: Run) -> list[bytes]:
    return (run.path / "examples.jsonl").read_bytes().split(b"\n")[:-1]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.open(tmp_path / "outputs", CONFIG, LABELS, {"python": "3"})


# Identity


def test_identity_is_a_fixed_function_of_the_content(monkeypatch: pytest.MonkeyPatch) -> None:
    # By hand: sha256 of {"config":{"a":1,"b":[1.0,null,true]},"numerics":1}. It must never change by accident.
    monkeypatch.setattr(kvexp, "NUMERICS", 1)
    assert run_hash({"b": (1.0, None, True), "a": 1}) == "295cf4d7389ba48d"


def test_identity_ignores_the_order_of_keys_and_the_kind_of_container() -> None:
    nested = MappingProxyType({"layers": 2, "name": "tiny"})
    other = OrderedDict(sizes=(1, 2), kv_ratio=0.5, method="h2o", model=nested)
    assert run_hash(other) == run_hash(CONFIG) == run_hash(json.loads(json.dumps(CONFIG)))


@pytest.mark.parametrize(
    "change",
    [
        *({"method": "keyformer"}, {"kv_ratio": 0.50000001}, {"sizes": [2, 1]}, {"sizes": [1, 2.0]}, {"extra": None}),
        *({"model": {"name": "tiny", "layers": 3}}, {"model": {"name": "tiny", "layers": 2.0}}),
        {"model": {"name": "tiny", "layers": "2"}},
    ],
)
def test_identity_sees_every_change(change: dict[str, Any]) -> None:
    assert run_hash(CONFIG | change) != run_hash(CONFIG)


def test_identity_tells_1_from_true_and_from_1_0() -> None:
    assert len({run_hash({"a": value}) for value in (1, 1.0, True, "1", [1], None)}) == 6


def test_a_change_of_numerics_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Run.open(tmp_path, CONFIG, LABELS)
    monkeypatch.setattr(kvexp, "NUMERICS", kvexp.NUMERICS + 1)
    new = Run.open(tmp_path, CONFIG, LABELS)
    assert new.hash != old.hash and new.numerics == old.numerics + 1
    assert {found.numerics for found in runs(tmp_path)} == {old.numerics, new.numerics}  # the old one is still readable


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({"budget": {"ratio": float("nan")}}, r"config\.budget\.ratio is nan"),
        ({"budget": [1, float("inf")]}, r"config\.budget\[1\] is inf"),
        ({"path": Path("model")}, r"config\.path is of type \w*Path"),
        ({"layers": {1: 2}}, r"config\.layers has the key 1; .* write '1'"),
        ({"names": {"a"}}, r"config\.names is of type set"),
        ({"raw": b"a"}, r"config\.raw is of type bytes"),
    ],
)
def test_what_json_cannot_say_is_refused_by_place(tmp_path: Path, config: dict[str, Any], place: str) -> None:
    with pytest.raises(ConfigError, match=place):
        run_hash(config)
    with pytest.raises(ConfigError, match=place):
        Run.open(tmp_path, config, LABELS)
    assert not list(tmp_path.iterdir())


# The folder


def test_the_folder_says_what_was_run(tmp_path: Path) -> None:
    run = Run.open(tmp_path / "new" / "outputs", CONFIG, LABELS, {"commit": "abc"}, baseline="0123456789abcdef")
    assert run.path == tmp_path / "new" / "outputs" / run.hash and run.hash == run_hash(CONFIG)
    expected = {"hash": run.hash, "numerics": kvexp.NUMERICS, "config": CONFIG, "labels": LABELS}
    assert json.loads((run.path / "config.json").read_text()) == expected | {"baseline": "0123456789abcdef"}
    assert json.loads((run.path / "env.json").read_text()) == {"commit": "abc"} == run.env
    assert run.rows() == [] and not run.finished and run.failure() is None


def test_opening_again_finds_the_rows_and_keeps_what_was_recorded_first(run: Run) -> None:
    run.append(row(0))
    again = Run.open(run.path.parent, dict(reversed(CONFIG.items())), {"model": "other"}, {"python": "4"})
    assert again.rows() == [row(0)] and again.labels == LABELS and again.env == {"python": "3"}


def test_every_name_a_run_was_asked_for_under_is_kept(run: Run) -> None:
    assert run.asked == [LABELS] and not (run.path / "asked.json").exists()
    for labels in ({"model": "other"}, {"model": "third"}, {"model": "other"}):
        Run.open(run.path.parent, CONFIG, labels)
    assert run.asked == [LABELS, {"model": "third"}, {"model": "other"}], "the latest last, none twice"
    assert Run.load(run.path).labels == LABELS
    for text in ("{", "[]", '{"labels": []}', '{"labels": [[1]]}', '{"labels": [{"kv_ratio": "0.5"}]}', "[" * 99999):
        (run.path / "asked.json").write_text(text)
        with pytest.warns(UserWarning, match=r"asked.json: .*; left out: remove the file or correct it"):
            assert run.asked == [LABELS]


def test_a_folder_is_tried_before_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_writable(tmp_path / "new" / "outputs")
    assert not list((tmp_path / "new" / "outputs").iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/outputs: Not a directory; a part of this path is a file: choose ano"):
        check_writable(tmp_path / "file" / "outputs")
    for number, words in {
        errno.ENOSPC: "No space left on device; free disk space",
        errno.EROFS: "Read-only file system; make it writable or choose another outputs_dir",
    }.items():
        error = OSError(number, os.strerror(number))
        monkeypatch.setattr(os, "write", lambda fd, data, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(ConfigError, match=words):
            check_writable(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "new"], "nothing is left behind"


def test_another_configuration_in_the_folder_is_refused(run: Run) -> None:
    file = run.path / "config.json"
    file.write_text(file.read_text().replace("h2o", "a2sf"))
    with pytest.raises(ConfigError, match=rf"{run.hash}, but \w+ by its content"):
        Run.open(run.path.parent, CONFIG, LABELS)


def test_another_baseline_is_refused(tmp_path: Path) -> None:
    Run.open(tmp_path, CONFIG, LABELS, baseline="a" * 16)
    assert Run.open(tmp_path, CONFIG, LABELS).baseline == "a" * 16
    with pytest.raises(ConfigError, match=f"baseline {'a' * 16}, not {'b' * 16}"):
        Run.open(tmp_path, CONFIG, LABELS, baseline="b" * 16)


def test_runs_lists_what_is_readable(tmp_path: Path) -> None:
    assert list(runs(tmp_path / "nowhere")) == []
    good = [Run.open(tmp_path, CONFIG | {"kv_ratio": ratio}, LABELS) for ratio in (0.2, 0.5)]
    (tmp_path / "notes").mkdir()
    (tmp_path / "file.txt").write_text("not a run")
    assert [found.hash for found in runs(tmp_path)] == sorted(run.hash for run in good)
    (good[0].path / "config.json").write_text('{"hash": ')
    with pytest.warns(UserWarning, match=rf"left out: .*{good[0].hash}.config\.json"):
        assert [found.hash for found in runs(tmp_path)] == [good[1].hash]


def test_a_copied_folder_does_not_count_twice(run: Run) -> None:
    copy = run.path.with_name("copy")
    copy.mkdir()
    (copy / "config.json").write_bytes((run.path / "config.json").read_bytes())
    with pytest.warns(UserWarning, match="left out: "):
        assert [found.path for found in runs(run.path.parent)] == [run.path]


# Rows

RECEIPT = {"slots": 3.0, "first_eviction_step": None, "batch_size": 1, "retrieval": {"notes": []}}
EDITED = [
    ({"metrics": {"rouge1": "12.5"}}, "metrics.rouge1 must be a number, got '12.5'"),
    ({"metrics": {"rouge1": True}}, "metrics.rouge1 must be a number, got True"),
    ({"metrics": [12.5]}, r"metrics must be a group of fields, got \[12.5\]"),
    ({"metrics": {"rouge1": 10**400}}, "metrics.rouge1 must be a number, got 1000"),
    ({"index": None}, "index must be a whole number, got None"),
    ({"index": "0"}, "index must be a whole number, got '0'"),
    ({"index": 0.0}, "index must be a whole number, got 0.0"),
    ({"new_tokens": [3]}, r"new_tokens must be a whole number, got \[3\]"),
    ({"seconds": {"ttft": "1 s"}}, "seconds.ttft must be a number, got '1 s'"),
    ({"receipt": "none"}, "receipt must be a group of fields, got 'none'"),
    ({"receipt": {**RECEIPT, "slots": {}}}, "receipt.slots must be a number, got {}"),
    ({"receipt": {**RECEIPT, "retrieval": []}}, r"receipt.retrieval must be a group of fields, got \[\]"),
    ({"receipt": {**RECEIPT, "retrieval": {"notes": "a"}}}, "receipt.retrieval.notes must be a list, got 'a'"),
    ({"receipt": {**RECEIPT, "slots_by_layer": [1, "2"]}}, r"receipt.slots_by_layer\[1\] must be a number, got '2'"),
    ({"output": 7}, "output must be a text, got 7"),
    ({"skipped": True}, "skipped must be a text, got True"),
    ({"info": []}, r"info must be a group of fields, got \[\]"),
]


JUNK = [
    *(b'{"example": "e1", "ind', b"\x00" * 40, b"\xff\xfe{}", b"[1, 2]", b'{"index": 1}', b'{"example": 1}'),
    *(b'{"example": "e1", "nll": NaN}', b"[" * 100_000, b'{"example": "e1"}{"example": "e2"}'),
]
DAMAGED = [*((json.dumps(row(1) | fields).encode(), words) for fields, words in EDITED), *((junk, "") for junk in JUNK)]


@pytest.mark.parametrize(("line", "words"), DAMAGED, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_a_damaged_row_is_named_and_stays(run: Run, line: bytes, words: str) -> None:
    """Its line, its field and what to do; left out it would change a mean and not say so."""
    for number in range(3):
        run.append(row(number))
    run.finish(3)
    file, kept = run.path / "examples.jsonl", lines(run)
    damaged = b"\n".join([kept[0], line, kept[2], b""])
    file.write_bytes(damaged)
    with pytest.raises(ConfigError, match=rf"examples.jsonl:2: {words}.*; correct the line, or remove it and run"):
        run.rows()
    assert file.read_bytes() == damaged
    file.write_bytes(b"\n".join([kept[0], b"", kept[2], b""]))
    assert ids(run) == ["e0", "e2"] and not run.finished
    run.append(row(1))
    assert run.finished


def test_infinity_in_a_number_of_its_own_spelling_is_no_number(run: Run) -> None:
    (run.path / "examples.jsonl").write_text('{"example": "a", "index": 0, "metrics": {"nll": 1e999}}\n')
    with pytest.raises(ConfigError, match=r"metrics\.nll must be a number, got inf"):
        run.rows()


@pytest.mark.parametrize("field", ["hash", "numerics", "config", "labels", "baseline"])
@pytest.mark.parametrize("value", [[], 1.5, [[]], {"kv_ratio": "x"}])
def test_an_edited_config_is_no_record_of_a_run(run: Run, field: str, value: Any) -> None:
    found = json.loads((run.path / "config.json").read_text())
    (run.path / "config.json").write_text(json.dumps(found | {field: value}))
    with pytest.raises(ConfigError, match=r"config.json is no record of a run|config.json: hash"):
        Run.load(run.path)


def test_rows_come_back_as_written(run: Run) -> None:
    odd = row(0, 'new\nline, "quote", \u2028, \x00, 漢字, lone \ud800, \U0001f600')
    odd["seconds"] = {"ttft": 0.1 + 0.2, "tpot": None, "big": 2**70, "tiny": 5e-324}
    run.append(odd)
    run.append(row(1))
    assert run.rows() == [odd, row(1)] and len(lines(run)) == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"index": 1}, "example's id as a string, got example=None"),
        ({"example": 3}, "got example=3"),
        ({"example": "e", "metrics": {"nll": float("nan")}}, r"row\.metrics\.nll is nan.*null"),
        ({"example": "e", "slots": object()}, r"row\.slots is of type object"),
    ],
)
def test_a_row_that_cannot_be_read_back_is_refused(run: Run, bad: dict[str, Any], message: str) -> None:
    run.append(row(0))
    with pytest.raises(ValueError, match=message):
        run.append(bad)
    assert run.rows() == [row(0)]


def test_the_first_of_two_rows_counts(run: Run) -> None:
    for found in (row(0, "first"), row(1), row(0, "second")):
        run.append(found)
    run.finish(2)
    assert run.rows() == [row(0, "first"), row(1)] and run.finished


def test_finished_needs_the_word_and_the_rows(run: Run) -> None:
    run.append(row(0))
    assert not run.finished
    run.finish(2)
    assert not run.finished
    run.append(row(1))
    assert run.finished
    run.append(row(2))
    assert not run.finished
    (run.path / "done.json").write_text("")
    assert not run.finished


def test_a_failure_is_recorded_and_cleared(run: Run) -> None:
    try:
        raise MemoryError("the model \ud800 needs more")
    except MemoryError as error:
        run.fail(error)
    failure = Run.load(run.path).failure()
    assert failure is not None and set(failure) == {"error", "message", "traceback", "time"}
    assert failure["error"] == "MemoryError" and failure["message"] == "the model \ud800 needs more"
    assert "test_record.py" in failure["traceback"] and failure["time"].endswith("+00:00")
    (run.path / "failure.json").write_text("{")
    assert run.failure() == run.failure() != failure  # damaged, but still a failure
    run.clear_failure()
    run.clear_failure()
    assert run.failure() is None


# Damage


def test_a_line_cut_anywhere_costs_only_itself(run: Run) -> None:
    run.append(row(0))
    start = (run.path / "examples.jsonl").stat().st_size
    run.append(row(1, "漢" * 5))
    whole = (run.path / "examples.jsonl").read_bytes()
    for cut in range(start, len(whole)):
        (run.path / "examples.jsonl").write_bytes(whole[:cut])
        assert run.rows() == [row(0)]
        run.append(row(2))
        assert run.rows() == [row(0), row(2)] and len(lines(run)) == 2
    (run.path / "examples.jsonl").write_bytes(b'{"example": "e')  # the very first line
    run.append(row(3))
    assert run.rows() == [row(3)]


# Disks


def full_disk(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half_a_write(fd: int, data: bytes, write: Callable[[int, bytes], int] = os.write) -> int:
    return write(fd, bytes(data)[: len(data) // 2])


@pytest.mark.parametrize(("call", "fake"), [("write", full_disk), ("write", half_a_write), ("fsync", full_disk)])
def test_a_full_disk_costs_no_row(
    run: Run, monkeypatch: pytest.MonkeyPatch, call: str, fake: Callable[..., int]
) -> None:
    run.append(row(0))
    before = (run.path / "examples.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fake)
        with pytest.raises(
            OSError, match=r"cannot write .*examples\.jsonl: No space left.*; free disk space"
        ) as caught:
            run.append(row(1))
    assert caught.value.errno == errno.ENOSPC
    assert (run.path / "examples.jsonl").read_bytes() == before
    run.append(row(1))
    assert run.rows() == [row(0), row(1)]


def test_a_line_the_disk_cut_and_would_not_take_back_is_cut_later(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.append(row(0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half_a_write)
        patch.setattr(os, "ftruncate", full_disk)
        with pytest.raises(OSError, match="cannot write"):
            run.append(row(1))
    assert len((run.path / "examples.jsonl").read_bytes()) > len(lines(run)[0]) + 1  # half a line is there
    assert run.rows() == [row(0)]
    run.append(row(2))
    assert run.rows() == [row(0), row(2)]


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_keeps_the_old_files(run: Run, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    run.finish(3)
    before = {file.name: file.read_bytes() for file in run.path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full_disk)
        with pytest.raises(OSError, match=r"cannot write .*done\.json: No space left"):
            run.finish(4)
        with pytest.raises(OSError, match=r"cannot write .*failure\.json: No space left"):
            run.fail(ValueError("x"))
        with pytest.raises(ConfigError, match=r"cannot write .*: No space left.*free disk space"):
            Run.open(run.path.parent, CONFIG | {"kv_ratio": 0.1}, LABELS)
    assert {file.name: file.read_bytes() for file in run.path.iterdir()} == before  # and no temporary file
    assert [found.hash for found in runs(run.path.parent)] == [run.hash]
    assert Run.open(run.path.parent, CONFIG | {"kv_ratio": 0.1}, LABELS).rows() == []


def test_an_unwritable_place_is_named_before_anything_runs(tmp_path: Path) -> None:
    blocker = tmp_path / "outputs"
    blocker.write_text("a file")
    for place in (blocker, blocker / "below"):  # permissions would not stop root, a file does
        with pytest.raises(ConfigError, match=rf"cannot write {place}.*: (Not a dir|File exists).*another outputs_dir"):
            Run.open(place, CONFIG, LABELS)
    with pytest.raises(ConfigError, match=rf"cannot read {blocker}: Not a directory"):
        list(runs(blocker))
    assert blocker.read_text() == "a file"


def test_a_folder_that_went_away_is_named(run: Run) -> None:
    run.path.rename(run.path.with_name("elsewhere"))
    for action in (lambda: run.append(row(0)), lambda: run.finish(1), lambda: run.claim().__enter__()):
        with pytest.raises(FileNotFoundError, match=rf"cannot write {run.path}.*; check the path"):
            action()
    assert run.rows() == []


# Order of what reaches the disk


CALLS = ("mkdir", "open", "write", "fsync", "replace", "ftruncate", "unlink")


def test_files_change_by_rename_after_their_content_is_on_disk(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.finish(1)
    seen: list[str] = []

    def spy(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "replace":
                assert json.loads((run.path / "done.json").read_text()) == {"examples": 1}
                assert json.loads(Path(args[0]).read_text()) == {"examples": 2}
            seen.append(name)
            return real(*args, **kwargs)

        return call

    for name in ("write", "fsync", "replace"):
        monkeypatch.setattr(os, name, spy(name))
    run.finish(2)
    assert seen == ["write", "fsync", "replace", "fsync"]  # the last one: the folder
    seen.clear()
    run.append(row(0))
    run.append(row(1))
    assert seen == ["write", "fsync", "fsync", "write", "fsync"]  # one write a line; the folder once


class Crash(BaseException):
    """The process is dead: nothing it does from here on reaches the disk."""


def story(outputs: Path) -> Run:
    """What a runner does, whatever is there already."""
    run = Run.open(outputs, CONFIG, LABELS, {"python": "3"})
    with run.claim():
        run.clear_failure()
        done = set(ids(run))
        for number in range(3):
            if f"e{number}" not in done:
                run.append(row(number, "x" * 50))
        run.finish(3)
    return run


def test_a_crash_at_every_step_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = {name: getattr(os, name) for name in CALLS}
    for step in range(1000):
        outputs, count = tmp_path / str(step), 0

        def dying(name: str, step: int = step) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                if count > step:
                    if name == "write" and count == step + 1:  # dies in the middle of it
                        half_a_write(*args, write=real["write"])
                    raise Crash
                return real[name](*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, dying(name))
            try:
                story(outputs)
                survived = True
            except Crash:
                survived = False
        before = {found.path: found.rows() for found in runs(outputs)}  # readable at any moment
        run = story(outputs)
        expected = [row(number, "x" * 50) for number in range(3)]
        assert run.rows() == expected and len(lines(run)) == 3 and run.finished
        assert all(rows == expected[: len(rows)] for rows in before.values())
        assert {file.name for file in run.path.iterdir()} == {
            *("config.json", "env.json", "examples.jsonl", "done.json", ".lock", ".claim")
        }
        if survived:
            break
    assert survived and step > 30


# Several processes


WORKER = """
import os, sys
from kvexp.run.store import Run
run, total, step = Run.load(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
def say(word):
    print(word, flush=True)
with run.claim(waiting=lambda seconds: seconds or say("waiting"), poll=0.02):
    say("claimed")
    done = {row["example"] for row in run.rows()}
    for number in range(total):
        if f"e{number}" in done:
            continue
        if step == "ask":
            sys.stdin.readline()
        run.append({"example": f"e{number}", "pid": os.getpid()})
        say(f"e{number}")
    run.finish(total)
say("end")
"""


def start(script: str, *args: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script, *map(str, args)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


@pytest.fixture
def worker(run: Run) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts processes that work on the run, and ends them."""
    started: list[subprocess.Popen[str]] = []

    def begin(total: int, step: str = "go") -> subprocess.Popen[str]:
        started.append(start(WORKER, run.path, total, step))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_kill_9_hands_the_claim_to_the_one_who_waits(run: Run, worker: Callable[..., subprocess.Popen[str]]) -> None:
    first = worker(3, step="ask")
    assert hear(first) == "claimed"
    second = worker(3)
    assert hear(second) == "waiting"
    go_on(first)
    assert hear(first) == "e0"
    with pytest.raises(TimeoutError, match=rf"{run.path} is still being worked on"), run.claim(timeout=0):
        pass
    first.kill()
    assert [hear(second) for _ in range(4)] == ["claimed", "e1", "e2", "end"]
    assert [found["pid"] for found in run.rows()] == [first.pid, second.pid, second.pid] and run.finished


def test_a_forked_child_does_not_keep_its_killed_parents_claim(run: Run) -> None:
    script = (
        "import os, sys, time; from kvexp.run.store import Run\n"
        "with Run.load(sys.argv[1]).claim():\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        sys.stdin.read(); os._exit(0)\n"
        "    time.sleep(0.1); print('claimed', flush=True); time.sleep(60)\n"
    )
    with start(script, run.path) as process:
        assert hear(process) == "claimed"
        with pytest.raises(TimeoutError), run.claim(timeout=0):
            pass
        process.kill()
        with run.claim(timeout=5, poll=0.01):  # the child lives on until its input closes
            run.append(row(0))


def test_processes_that_claim_nothing_still_damage_nothing(
    run: Run, worker: Callable[..., subprocess.Popen[str]]
) -> None:
    script = (
        "import os, sys; from kvexp.run.store import Run; run = Run.load(sys.argv[1]); sys.stdin.readline()\n"
        "for i in range(30): run.append({'example': f'{os.getpid()}-{i}', 'output': 'x' * (i * 997)})\n"
    )
    with start(script, run.path) as one, start(script, run.path) as two:
        (run.path / "examples.jsonl").write_bytes(b'{"example": "torn')
        go_on(one)
        go_on(two)
        run.rows()
        assert one.wait(timeout=30) == two.wait(timeout=30) == 0
    assert sorted(ids(run)) == sorted(f"{process.pid}-{i}" for process in (one, two) for i in range(30))
    assert len(lines(run)) == 60


def test_opened_at_once_by_many(tmp_path: Path) -> None:
    opened: list[Run] = []
    barrier = threading.Barrier(8)

    def begin(number: int) -> None:
        barrier.wait()
        opened.append(Run.open(tmp_path, CONFIG, LABELS | {"number": number}))

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 8 and len({run.labels["number"] for run in opened}) == 1  # the fastest one's
    assert [found.hash for found in runs(tmp_path)] == [run_hash(CONFIG)]


def test_claims_wait_report_and_end(run: Run) -> None:
    waited: list[float] = []
    with (
        run.claim(),
        pytest.raises(TimeoutError),
        Run.load(run.path).claim(timeout=0.1, waiting=waited.append, poll=0.03),
    ):
        pytest.fail("two hold the claim")
    assert waited[0] == 0.0 and len(waited) >= 3 and waited == sorted(waited) and waited[-1] <= 0.1
    with pytest.raises(KeyError, match="inside"), run.claim():
        raise KeyError("inside")
    with run.claim(timeout=0):  # an error inside the block released it
        run.append(row(0))


VALUES = [
    None,
    True,
    0,
    -3,
    2.5,
    10**14,
    10**16,
    2**63,
    1e16,
    1e301,
    float("inf"),
    float("nan"),
    "text",
    {},
    {"a": 1},
    [],
]


@pytest.mark.parametrize("kind", [*store.TYPES, [store.NUMBER], [store.TEXT], {store.EACH: store.NUMBER}, store.ROW])
def test_what_fits_at_first_sight_fits(kind: Any) -> None:
    values = [*VALUES, *([value, 1.0] for value in VALUES), *({"index": value} for value in VALUES)]
    plain = [value for value in values if store._plainly_fits(value, kind)]
    assert 0 < len(plain) < len(values)
    for value in plain:
        assert store._wrong(value, kind, "") is None, value
