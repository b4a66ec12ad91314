"""Training the testbed's models: what a lesson weighs, resuming, the folder that comes out, several at a time."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
import torch
from turns import in_turn

from experiments.studies.testbed import (
    CURRICULUM,
    IDS,
    KINDS,
    NAMES,
    Recipe,
    Trainer,
    lesson,
    main,
    several,
    train_family,
)
from kvexp.tasks.testbed import END, PAD
from kvexp.util.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SMALL = Recipe(steps=4, batch_tokens=128, every=2)


def quiet(_):
    pass


def test_lessons_weigh_answers_and_never_padding():
    for kind in KINDS:
        batch = lesson(Random(kind), "train", CURRICULUM[3], kind, Recipe(batch_tokens=1024))
        assert batch.ids.numel() <= 1400 and batch.ids.shape == batch.weight.shape == batch.answered.shape
        padding = batch.ids == IDS[PAD]
        assert (batch.weight[padding] == 0).all() and not batch.answered[padding].any()
        assert (batch.weight[batch.answered] == 1).all() and not (batch.answered & (batch.weight < 1)).any()
        assert batch.answered.any(1).all()
        assert (batch.ids[batch.weight == 1] == IDS[END]).sum() >= len(batch.ids)
        assert not (batch.ids[batch.answered] == IDS[END]).any()


# -- one training ----------------------------------------------------------------------------------------------------


class Killed(Exception):
    pass


def killed(*_):
    raise Killed


@pytest.mark.parametrize("name", in_turn(NAMES, of=len(NAMES)))
def test_a_killed_training_goes_on_as_if_nothing_had_happened(name, tmp_path):
    whole = Trainer(name, SMALL, tmp_path / "whole")
    whole.run(quiet)
    with pytest.raises(Killed):
        Trainer(name, SMALL, tmp_path / "parts").run(killed)
    resumed = Trainer(name, SMALL, tmp_path / "parts")
    assert resumed.step == 2
    resumed.run(quiet)
    for (key, one), other in zip(whole.model.state_dict().items(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(one, other), key
    assert len((tmp_path / "parts" / "training.jsonl").read_text().splitlines()) == 2


def test_a_training_killed_while_it_saved_loses_no_line_of_its_log(tmp_path, monkeypatch):
    """Killed between the log and the checkpoint; the other way round the last line would never be written."""
    monkeypatch.setattr(torch, "save", killed)
    with pytest.raises(Killed):
        Trainer("testbed_rope", Recipe(steps=1, batch_tokens=128), tmp_path).run(quiet)
    assert len((tmp_path / "training.jsonl").read_text().splitlines()) == 1
    assert not (tmp_path / "checkpoint.pt").exists()


def test_another_recipe_is_refused(tmp_path):
    Trainer("testbed_rope", Recipe(steps=1, batch_tokens=128), tmp_path).run(quiet)
    with pytest.raises(ConfigError, match="is of another recipe: remove"):
        Trainer("testbed_rope", SMALL, tmp_path)


def test_a_trained_folder_loads_like_any_model_and_speaks_words(tmp_path):
    from transformers import AutoTokenizer

    from kvexp.hf import load_model, load_tokenizer

    said = []
    train_family("testbed_gqa", SMALL, tmp_path / "work", tmp_path / "out", lambda trainer: said.append(trainer.step))
    assert said == [0, 2, 4]
    folder = tmp_path / "out" / "testbed_gqa"
    model, tokenizer = load_model(str(folder)), load_tokenizer(str(folder))
    text = "<s> text : first color alice red ! summary : first color alice red ! ;"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text.split())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.removeprefix("<s> ").removesuffix(" ;")
    assert model.config.eos_token_id == ids[-1] and model.generation_config.eos_token_id == ids[-1]
    anyone = AutoTokenizer.from_pretrained(str(folder))
    assert anyone.is_fast and anyone("<s> no such token").input_ids[-1] == anyone.unk_token_id
    for side in ("left", "right"):
        padded = anyone([text, "<s> text"], padding=True, padding_side=side).attention_mask[1]
        assert padded == ([0] * (len(ids) - 2) + [1, 1] if side == "left" else [1, 1] + [0] * (len(ids) - 2))
    assert anyone.padding_side == "left"
    facts = json.loads((folder / "training.json").read_text())
    assert facts["steps"] == 4 and facts["device"].startswith("CPU")


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    (tmp_path / "work" / "testbed_rope").mkdir(parents=True)
    with (tmp_path / "work" / "testbed_rope" / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process trains in"):
            train_family("testbed_rope", SMALL, tmp_path / "work", tmp_path / "out", quiet)


@pytest.mark.gpu
def test_a_training_on_a_gpu_learns_and_says_where_it_was(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    train_family("testbed_learned", SMALL, tmp_path / "work", tmp_path / "out", quiet)
    facts = json.loads((tmp_path / "out" / "testbed_learned" / "training.json").read_text())
    assert facts["device"] == torch.cuda.get_device_name()
    again = Trainer("testbed_learned", SMALL, tmp_path / "work" / "testbed_learned", "cuda")
    assert again.step == 4 and again.model.device.type == "cuda"


# -- several ---------------------------------------------------------------------------------------------------------


def python(program):
    return [sys.executable, "-u", "-c", program]


def test_several_run_side_by_side_and_every_line_is_passed_on(capsys):
    commands = {name: python(f"print('1/2 of {name}'); print('2/2 done')") for name in ("one", "two", "three")}
    assert several(commands, 2) == []
    said = capsys.readouterr().out.splitlines()
    assert sorted(said) == sorted(f"{n}: {w}" for n in commands for w in (f"1/2 of {n}", "2/2 done"))


def test_what_fails_is_told_and_the_others_are_run(capsys):
    dies = python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    raises = python("raise ValueError('[red] is no markup')")
    failed = several({"killed": dies, "raises": raises, "well": python("print('3/3 done')")}, 1)
    assert failed == [
        "killed was ended by SIGKILL; what it said stands above",
        "raises ended with exit code 1; what it said stands above",
    ]
    said = capsys.readouterr().out
    assert "raises: ValueError: [red] is no markup" in said and "well: 3/3 done" in said


ASLEEP = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"
LAUNCHER = """
import pathlib, signal, sys
signal.signal(signal.SIGTERM, signal.default_int_handler)
from experiments.studies.testbed import several
folder = pathlib.Path(sys.argv[1])
several({name: [sys.executable, "-c", sys.argv[2], str(folder / name)] for name in ("a", "b", "c")}, 2)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupt_ends_those_that_run_and_begins_no_other(stage, number, tmp_path):
    launcher = stage.start([str(tmp_path), ASLEEP], tmp_path / "log", LAUNCHER)
    wait_for(lambda: all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in "ab"))
    launcher.send(number)
    assert launcher.wait(60) != 0
    assert not (tmp_path / "c").exists()
    for name in "ab":
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / name).read_text()), 0)


def wait_for(happened):
    end = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gpt"], "gpt is none of testbed_rope"),
        (["--workers", "0", "--out", "x"], "must be at least 1"),
        (["--steps", "0", "--out", "x"], "must be at least 1"),
        (["testbed_rope", "--steps", "3"], "kvexp's own models stay as they are"),
    ],
)
def test_bad_arguments(arguments, words, capsys):
    assert main(["train", *arguments]) == 2 and words in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_command_trains_is_killed_and_goes_on(tmp_path):
    """As `make testbed` does, one model after the other; interrupted when the first one has all its steps."""
    words = "-m experiments.studies.testbed train testbed_rope testbed_gqa --steps 2 --workers 1"
    line = [sys.executable, *words.split(), "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    first = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.DEVNULL)
    while not (tmp_path / "work" / "testbed_rope" / "checkpoint.pt").exists():
        assert first.poll() is None
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    assert first.wait(60) == 130
    assert not (tmp_path / "out").exists()
    again = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "testbed_rope: 2/2 stage 1" in again and "testbed_rope: 0/2" not in again
    assert "testbed_gqa: 0/2 begins" in again
    for name in ("testbed_rope", "testbed_gqa"):
        assert f"{name}: 2/2 done" in again and (tmp_path / "out" / name / "model.safetensors").exists()
