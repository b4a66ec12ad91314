"""wandb offline: what is published is read back from the record on disk."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvexp.results.table import table
from kvexp.results.wandb_log import check, main, publish
from kvexp.run.store import Run
from kvexp.util.errors import ConfigError

pytest.importorskip("wandb", reason="comes with kvexp[eval]")

ROOT = Path(__file__).resolve().parents[2]
# LevelDB's log format: blocks of records, each crc32, length, type (1 whole, 2 first, 3 middle, 4 last)
BLOCK, HEAD = 32768, 7


def records(file: Path) -> Iterator[bytes]:
    """The payloads of a .wandb file; every checksum is verified."""
    data, at, parts = file.read_bytes(), HEAD, b""  # wandb's own head: ":W&B", magic, version
    assert data[:4] == b":W&B"
    while at + HEAD <= len(data):
        if BLOCK - at % BLOCK < HEAD:  # the rest of a block is padding
            at += BLOCK - at % BLOCK
            continue
        crc, length, kind = struct.unpack_from("<IHB", data, at)
        payload = data[at + HEAD : at + HEAD + length]
        assert crc == zlib.crc32(bytes([kind]) + payload)
        parts, at = (payload if kind in (1, 2) else parts + payload), at + HEAD + length
        if kind in (1, 4):
            yield parts


def read(folder: Path) -> dict[str, Any]:
    """Project, group, job_type, config, summary and history of a published run."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("run-*.wandb")
    found: dict[str, Any] = {"config": {}, "summary": {}, "history": {}}
    for payload in records(file):
        record = wandb_internal_pb2.Record.FromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found |= {name: getattr(record.run, name) for name in ("project", "run_group", "job_type", "run_id")}
        for part, items in (
            ("config", [*record.run.config.update, *record.config.update]),
            ("summary", [*record.run.summary.update, *record.summary.update]),
            ("history", record.history.item),
        ):
            for item in items:
                found[part][item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return found


def row(index: int, score: float, evicts: bool) -> dict[str, Any]:
    receipt = {"slots": 5.0, "kv_bytes": 100, "peak_kv_bytes": 200, "first_eviction_step": 0 if evicts else None}
    found = {"example": f"e{index}", "index": index, "metrics": {"rouge1": score}, "prompt_tokens": 10}
    found |= {"new_tokens": 3, "skipped": None, "seconds": {"ttft": 0.1, "tt2t": 0.2, "tpot": 0.1}, "receipt": receipt}
    return found | {"output": f"output {index}\n{'words ' * 2000}", "reference": f"reference {index}"}


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """A baseline, a run that loses 10 %, a void one and a failed one. Long outputs: the record spans blocks."""
    folder, baseline = tmp_path / "outputs", None
    for method, ratio, factor in (("full", 1.0, 1.0), ("h2o", 0.5, 0.9), ("window", 0.9, 1.0), ("tova", 0.2, None)):
        labels = {"experiment": "first", "model": "tiny", "task": "xsum", "method": method, "kv_ratio": ratio}
        config = {"method": {"name": method}, "kv_ratio": ratio, "limit": 30}
        run = Run.open(folder, config, labels, baseline=baseline)
        if factor is None:
            run.fail(RuntimeError("out of memory"))
            continue
        for index in range(30):
            run.append(row(index, factor * (index + 1.0), evicts=method == "h2o"))
        run.finish(30)
        if method == "h2o":
            run.append_divergence([diverging(index) for index in range(30)])
        baseline = run.hash if method == "full" else baseline
    return folder


def diverging(index: int) -> dict[str, Any]:
    """Two tokens after the prefill's, of KL 0.1 and 0.3."""
    line = {"example": f"e{index}", "index": index, "text": "own", "first_by_prefill": True, "tokens": [1, 2, 3]}
    return line | {"kl": [0.0, 0.1, 0.3], "full_logprob": [-1.0] * 3, "logprob": [-1.5] * 3, "same_top1": [1, 1, 0]}


def command(outputs: Path, home: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    done = [sys.executable, "-m", "kvexp", "log", str(outputs), *options]
    return subprocess.run(done, cwd=ROOT, env=without_account(home), capture_output=True, text=True, timeout=240)


def without_account(home: Path) -> dict[str, str]:
    """An environment with a home of its own: no account, and nothing outside the test's folder."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    home_and_caches = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    return env | dict.fromkeys(home_and_caches, str(home))


def test_what_is_published_can_be_read_back(outputs: Path, tmp_path: Path) -> None:
    done = command(outputs, tmp_path, "--project", "trial")
    assert done.returncode == 0, done.stderr
    assert "published 4 runs to project trial, offline" in done.stdout
    folders = [path for path in (outputs / "wandb").glob("offline-run-*") if path.is_dir()]
    published = {found["run_id"]: found for found in map(read, folders)}
    rows = {each["hash"]: each for each in table(outputs).to_dict("records")}
    assert {found["job_type"] for found in published.values()} == {"full", "h2o", "window", "tova", "sweep"}
    assert {(found["project"], found["run_group"]) for found in published.values()} == {("trial", "first")}
    for key, expected in rows.items():
        check_run(published[key], expected, Run.load(outputs / key))
    (sweep,) = (found for found in published.values() if found["job_type"] == "sweep")
    check_sweep(sweep, next(folder for folder in folders if folder.name.endswith(sweep["run_id"])))
    (h2o,) = (key for key, each in rows.items() if each["method"] == "h2o")
    check_samples(next(folder for folder in folders if folder.name.endswith(h2o)))


def check_run(found: dict[str, Any], expected: dict[str, Any], run: Run) -> None:
    assert {name: found["config"][name] for name in run.config} == run.config
    assert found["config"]["kvexp"]["hash"] == run.hash and found["config"]["kvexp"]["labels"] == run.labels
    summary = found["summary"]
    assert summary["verdict99"] == expected["verdict99"] and summary["status"] == expected["status"]
    for name in ("rouge1", "rouge1_of_full", "rouge1_low", "needed", "kv_bytes", "tokens_per_s", "paired"):
        missing = expected[name] is None or expected[name] != expected[name] or str(expected[name]) == "<NA>"
        assert summary.get(name) == (None if missing else pytest.approx(expected[name]))
    if expected["method"] == "h2o":
        assert summary["rouge1_of_full"] == pytest.approx(90) and summary["verdict99"] == "fail"
        assert summary["divergence.own.kl"] == pytest.approx(0.2) and summary["divergence.own.top1"] == 0.5
        assert summary["divergence.own.verdict_kl"] == "worse"
    else:
        assert not [name for name in summary if name.startswith("divergence")]
    if expected["method"] == "window":
        assert summary["verdict99"] == "void" and "rouge1_of_full" not in summary


def check_samples(folder: Path) -> None:
    (file,) = (folder / "files" / "media" / "table").glob("examples_*.json")
    shown = json.loads(file.read_text(encoding="utf-8"))
    assert shown["columns"][:2] == ["example", "skipped"] and shown["columns"][-2:] == ["output", "reference"]
    assert len(shown["data"]) == 20
    assert shown["data"][3][-1] == "reference 3" and shown["data"][3][shown["columns"].index("rouge1")] == 3.6


def check_sweep(found: dict[str, Any], folder: Path) -> None:
    assert found["history"]["runs/_type"] == "table-file"
    assert found["summary"]["n_runs"] == 4 and found["summary"]["verdict99.void"] == 1
    drawn = {key.removesuffix("/_type") for key, kind in found["history"].items() if kind == "image-file"}
    assert drawn == {"quality", "divergence along own"}, "no reference was forced, no bytes at 16 bits are known"
    assert len([path for path in folder.rglob("media/images/*.png") if path.stat().st_size > 10_000]) == 2
    tables = [json.loads(path.read_text(encoding="utf-8")) for path in folder.rglob("*.table.json")]
    (whole,) = (each for each in tables if "hash" in each["columns"])
    assert len(whole["data"]) == 4
    distances = [row[whole["columns"].index("divergence.own.kl")] for row in whole["data"]]
    assert [kl for kl in distances if kl is not None] == [pytest.approx(0.2)], "h2o's, alone measured"


def test_a_run_published_again_has_one_folder(outputs: Path, tmp_path: Path) -> None:
    """The first time it was interrupted: a folder of it lies there, half written."""
    key = next(iter(table(outputs)["hash"]))
    cut, other = (outputs / "wandb" / f"offline-run-20200101_000000-{name}" for name in (key, "0123456789abcdef"))
    for folder in (cut, other):
        folder.mkdir(parents=True)
    for _ in range(2):
        assert command(outputs, tmp_path, "--project", "trial").returncode == 0
    names = [path.name for path in (outputs / "wandb").glob("offline-run-*") if path.is_dir()]
    assert len(names) == len({name.rpartition("-")[2] for name in names}) == 6, "four runs, their sweep, another's"
    assert not cut.exists() and other.exists()


@pytest.mark.parametrize(
    ("variables", "netrc", "expected"),
    [
        ({}, "", "offline"),
        ({"WANDB_API_KEY": "x"}, "", "online"),
        ({"WANDB_API_KEY": "x", "WANDB_MODE": "offline"}, "", "offline"),
        ({}, "machine api.wandb.ai login user password x", "online"),
        ({}, "machine example.org login user password x", "offline"),
        ({"WANDB_BASE_URL": "https://example.org"}, "machine example.org login user password x", "online"),
    ],
)
def test_offline_unless_an_account_is_configured(
    variables: dict[str, str], netrc: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_account(monkeypatch, tmp_path)
    (tmp_path / "netrc").write_text(netrc, encoding="utf-8")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert check("kvexp", None) == expected


def asked_by(*labels: dict[str, Any], folder: Path) -> Run:
    for each in labels:
        run = Run.open(folder, {"method": "full"}, {"model": "tiny", "task": "xsum", "method": "full"} | each)
    for index in range(2):
        run.append(row(index, 1.0, evicts=False))
    run.finish(2)
    return run


def test_groups_are_experiments_or_else_model_and_task(tmp_path: Path) -> None:
    asked_by({}, folder=tmp_path / "none")
    asked_by({}, folder=tmp_path / "given")
    asked_by({"experiment": "first"}, {"experiment": "second"}, folder=tmp_path / "two")
    code = (  # in a process of its own, whose end closes wandb's files
        "import sys; from pathlib import Path; from kvexp.results.wandb_log import publish\n"
        "for name, options in (('none', {}), ('given', {'experiment': 'mine'}), ('two', {})):\n"
        "    paths = [file.parent for file in Path(sys.argv[1], name).glob('*/config.json')]\n"
        "    publish(paths, mode='offline', **options)\n"
    )
    line = [sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(line, cwd=ROOT, env=without_account(tmp_path), check=True, timeout=240)

    def groups(place: str) -> set[tuple[str, str]]:
        folders = [path for path in (tmp_path / place / "wandb").glob("offline-run-*") if path.is_dir()]
        return {(found["run_group"], found["job_type"]) for found in map(read, folders)}

    assert groups("none") == {("tiny/xsum", "full"), ("tiny/xsum", "sweep")}
    assert groups("given") == {("mine", "full"), ("mine", "sweep")}
    assert groups("two") == {("second", "full"), ("first", "sweep"), ("second", "sweep")}


@pytest.mark.parametrize(
    ("project", "mode", "words"),
    [
        ("", None, "log.project must be a name, got ''"),
        (None, None, "log.project must be a name, got None"),
        ("a/b#", None, "none of / .*, got / #"),
        ("a" * 129, None, "may have 128 characters .*, got 129 characters"),
        ("kvexp", None, "the variable WANDB_MODE must be one of online, offline, disabled, got 'dry"),
        ("kvexp", "sometimes", "log.mode must be one of auto, online, offline, disabled, got 'sometimes'"),
    ],
)
def test_what_wandb_cannot_take(project: Any, mode: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    with pytest.raises(ConfigError, match=words):
        check(project, mode)
    assert check("kvexp", "offline") == "offline"


def test_nothing_to_publish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nothing")]) == 2
    said = capsys.readouterr().err.replace("\n", " ")
    assert said.startswith(f"error: no folder {tmp_path / 'nothing'}; name the outputs")
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty")]) == 1 and "no run under" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"config\.json"):
        publish([tmp_path / "nothing"], mode="offline")


def test_disabled_writes_nothing_and_without_wandb_the_error_says_what_to_install(
    outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [path.parent for path in outputs.glob("*/config.json")]
    assert publish(paths, mode="disabled") == [] and not (outputs / "wandb").exists()
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install"):
        publish(paths, mode="offline")


def no_account(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    (home / "netrc").touch()
    monkeypatch.setenv("NETRC", str(home / "netrc"))
