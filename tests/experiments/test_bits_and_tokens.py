"""Which numbers of tokens and of bits fit into a share of bytes."""

from __future__ import annotations

import pytest

from experiments.studies.bits_and_tokens import main, possibilities


def test_the_list_of_what_fits() -> None:
    found = possibilities([0.5, 0.01], [(16, 16), (8, 8), (4, 2)], {"residual": 32, "group": 32}, 64, 1000)
    slots = [one.slots for one in found]
    assert slots[0] == 500 and slots[0] < slots[1] < slots[2] and slots[3] == 10
    for one in found:
        assert one.bytes <= one.allowed and (one.bytes_ratio, one.key_bits) != (0, 0)
    assert found[1].prompt_share == slots[1] / 1000


def test_the_lists_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model=tiny", "bytes_ratio=0.5,0.25", "prompt_tokens=200", "cache.bits=16,4", "cache.group=8"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "tiny: heads of 16 channels, prompts of 200 tokens; bytes of one kv head"
    assert out[2].split()[:4] == ["0.5", "16", "16", "100"] and len(out) == 7
    assert out[-1] == "kvexp run -m bytes_ratio=0.5,0.25 cache.bits=16,4 cache.group=8 model=tiny"
    assert main(["model=tiny", "cache.key_bits=4", "cache.value_bits=2,4", "cache.group=8", "bytes_ratio=0.3"]) == 0
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .endswith("cache.key_bits=4 cache.value_bits=2,4 cache.group=8 model=tiny")
    )
    for words, told in (
        (["bits=4"], "bits=4: the settings are model=NAME"),
        (["model=tiny", "bytes_ratio=2"], "bytes_ratio must be in (0, 1], got '2'"),
        (["model=tiny", "prompt_tokens=1.5"], "prompt_tokens must be a whole number of at least 1, got '1.5'"),
        (["model=tiny", "cache.bits=3"], "must be one of 16, 8, 4, 2"),
        (["model=tiny"], "cache.group=32 does not divide the 16 channels"),
    ):
        assert main(words) == 2
        assert told in capsys.readouterr().err
