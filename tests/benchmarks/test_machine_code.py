"""What `make gpu-compile` compiles, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks import machine_code
from benchmarks.machine_code import DTYPES, METHODS, Case, broken, cases, main, specialise

USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function column_sums:
  REG:168 STACK:{stack} SHARED:32 LOCAL:{local} CONSTANT[0]:700 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


@pytest.mark.parametrize(
    ("stack", "local", "shared", "words"),
    [
        (16, 0, 1000, "registers are spilled: 16 bytes of stack"),
        (0, 8, 1000, "8 of local memory"),
        (0, 0, 164 * 1024, "167936 bytes of shared memory, of 163 KiB"),
    ],
)
def test_a_spill_and_too_much_memory_are_said(stack, local, shared, words):
    assert broken(USAGE.format(stack=0, local=0), 163 * 1024, 80) == []
    (said,) = broken(USAGE.format(stack=stack, local=local), shared, 80)
    assert words in said
    with pytest.raises(ValueError, match="no kernel"):
        broken("no usage", 0, 80)


def test_a_call_is_specialised_as_triton_does():
    """Ones become constants, other integers and addresses are known to be divisible by 16 or not."""
    names = ["x", "y", "rows", "groups", "heads", "scale", "M"]
    params = [SimpleNamespace(name=name, is_constexpr=name == "M") for name in names]
    kernel = SimpleNamespace(__name__="kernel", arg_names=names, params=params)
    x = torch.empty(40, dtype=torch.bfloat16)
    spec = specialise(kernel, (x, x[4:], 1021, 1, 32, 0.5), {"M": 64, "num_warps": 8})
    assert [kind for _, kind in spec.signature] == ["*bf16", "*bf16", "i32", "constexpr", "i32", "fp32", "constexpr"]
    assert spec.constants == (("groups", 1), ("M", 64)) and spec.aligned == (0, 4)
    assert spec.options == (("num_warps", 8),)
    assert spec == specialise(kernel, (x, x[4:], 1023, 1, 48, 0.1), {"M": 64, "num_warps": 8})


def test_the_calls_are_what_models_need():
    for phase in ("prompt", "decode"):
        mine = [case for case in cases() if case.phase == phase]
        assert {case.head_size for case in mine} == {64, 80, 96, 128, 256}
        assert {case.dtype for case in mine} == set(DTYPES)
        assert {case.position for case in mine} == {"rope", "alibi", "window"}
        assert {case.upcast for case in mine} == {True, False}
    assert {case.method for case in cases() if case.phase == "prompt"} == set(METHODS)
    assert str(Case("prompt", 64, "bf16", "h2o", "alibi")) == "D=64 bf16 h2o alibi"


def test_what_hinders_a_compilation_is_said(monkeypatch, capsys):
    monkeypatch.setattr(machine_code, "find_spec", lambda name: None)
    assert main([]) == 1 and "run make gpu-compile" in capsys.readouterr().err
    monkeypatch.setattr(machine_code, "find_spec", lambda name: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main([]) == 1 and "unset it" in capsys.readouterr().err
