"""What `make gpu-compile` reads out of machine code, and what it refuses."""

from __future__ import annotations

import csv
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.machine_code import compiler
from benchmarks.machine_code.__main__ import main
from benchmarks.machine_code.cases import ALL, DEFAULT, DTYPES, HEAD_SIZES, METHODS, POSITIONS, Case
from benchmarks.machine_code.launches import Specialisation, specialise
from benchmarks.machine_code.sass import DEVICES, Line, MachineCode, broken, differences, programs_at_once, read, table

ROOT = Path(__file__).resolve().parents[2]
USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function column_sums:
  REG:168 STACK:16 SHARED:32 LOCAL:0 CONSTANT[0]:700 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
SASS = """
	code for sm_90a
		Function : column_sums
        /*0000*/                   LDC R1, c[0x0][0x28] ;           /* 0x00000a00ff017b82 */
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR8][R2.64] ; /* 0x0000000802048981 */
        /*0020*/               @P1 LDG.E R8, desc[UR8][R2.64] ;
        /*0030*/                   LDGSTS.E.BYPASS.128 [R9], desc[UR8][R2.64] ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0050*/             @!UP0 HMMA.16816.F32 R4, R4, R8, R12 ;
        /*0060*/                   FFMA R5, R5, R6, R7 ;
        /*0070*/                   FFMA2 R10, R10, R12, R14 ;
        /*0080*/                   STL.64 [R1], R4 ;
        /*0090*/                   LDL R4, [R1] ;
        /*00a0*/                   LDL R5, [R1+0x4] ;
        /*1fff0*/                  STG.E desc[UR8][R2.64], R5 ;
        /*00c0*/                   EXIT ;
"""
GOOD = MachineCode(
    registers=128,
    stack=0,
    shared=40 * 1024,
    warps=4,
    spill_stores=0,
    spill_loads=0,
    tensor=8,
    fma=100,
    global_loads=9,
    wide_loads=4,
    global_stores=1,
    atomics=0,
)
SPEC = Specialisation(
    "column_sums", (("q", "*bf16"), ("k", "*bf16")), (("BLOCK_D", 128), ("M", 64), ("N", 64)), (0,), (("num_warps", 4),)
)
CALL = ("D=128 bf16 h2o",)


def test_a_listing_is_counted():
    code = read(USAGE, SASS, shared=1000, warps=8)
    assert code == MachineCode(
        registers=168,
        stack=16,
        shared=1032,
        warps=8,
        spill_stores=1,
        spill_loads=2,
        tensor=2,
        fma=3,
        global_loads=3,
        wide_loads=2,
        global_stores=1,
        atomics=0,
    )
    assert code.spills == 3
    with pytest.raises(ValueError, match="no kernel"):
        read("no usage", SASS, shared=0, warps=4)
    with pytest.raises(ValueError, match="no kernel"):
        read(USAGE, "", shared=0, warps=4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"spill_loads": 1}, "0 spill stores and 1 spill loads"),
        ({"spill_stores": 4}, "4 spill stores"),
        ({"stack": 8}, "8 bytes of stack"),
        ({"shared": 164 * 1024}, "gives a program 166912"),
        ({"tensor": 0}, "take no tensor cores"),
        ({"registers": 255, "warps": 16}, "no program fits"),
        ({"atomics": 1}, "atomic"),
    ],
)
def test_every_bar_can_be_broken(change, words):
    assert broken(SPEC, GOOD, 80) == []
    (said,) = broken(SPEC, replace(GOOD, **change), 80)
    assert words in said


def test_float32_products_take_no_tensor_cores():
    """They would be TensorFloat-32, which keeps ten bits."""
    exact = replace(SPEC, signature=(("q", "*fp32"),))
    assert broken(exact, replace(GOOD, tensor=0), 90) == []
    assert broken(exact, GOOD, 90) == ["float32 products take tensor cores"]
    raised = replace(SPEC, constants=(*SPEC.constants, ("UPCAST", True)))
    assert broken(raised, replace(GOOD, tensor=0), 90) == []


def test_how_many_programs_fit():
    """By hand: 128 registers x 32 threads x 4 warps are 16 Ki of 64 Ki; 40 KiB and 1 KiB go four times into 164."""
    assert programs_at_once(GOOD, 80) == 4
    assert programs_at_once(replace(GOOD, registers=64, shared=0), 80) == 8
    assert programs_at_once(replace(GOOD, registers=16, shared=0, warps=8), 80) == 8
    assert programs_at_once(replace(GOOD, shared=100 * 1024), 80) == 1
    assert programs_at_once(replace(GOOD, shared=100 * 1024), 90) == 2


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


def test_a_spill_that_is_new_is_seen_in_the_table():
    line = Line(SPEC, CALL, dict.fromkeys(DEVICES, GOOD))
    recorded = table([line], "3.0")
    assert 'column_sums D=128 bf16 h2o,"64 x 64, 4",128,40,0,8,"9, 4",' in recorded
    assert differences(recorded, table([line], "3.0")) == []
    spilled = replace(line, codes={**line.codes, 100: replace(GOOD, spill_loads=2)})
    plus, minus = differences(recorded, table([spilled], "3.0"))
    assert "0 / 0 / 2" in plus and plus.startswith("+ column_sums") and minus.startswith("- column_sums")


def test_the_table_has_no_spills_and_every_head_size():
    with (ROOT / "benchmarks" / "machine_code" / "table.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))[1:]
    kernels = {row[0].split()[0] for row in rows}
    assert kernels == {"row_log_sum_exp", "column_sums", "split_kv_attention", "combine_splits"}
    assert {row[4] for row in rows} == {"0"}
    for kernel in ("row_log_sum_exp", "column_sums", "split_kv_attention"):
        sizes = {int(found) for row in rows if kernel in row[0] for found in re.findall(r"D=(\d+)", row[0])}
        assert sizes == set(HEAD_SIZES)


def test_the_sets_have_what_models_need():
    assert set(DEFAULT) <= set(ALL)
    for phase in ("prompt", "decode"):
        assert {case.head_size for case in DEFAULT if case.phase == phase} == set(HEAD_SIZES)
        assert {case.dtype for case in DEFAULT if case.phase == phase} == set(DTYPES)
        assert {case.position for case in DEFAULT if case.phase == phase} == set(POSITIONS)
        every = {(case.head_size, case.dtype, case.position) for case in ALL if case.phase == phase}
        assert len(every) == len(HEAD_SIZES) * len(DTYPES) * len(POSITIONS)
    assert {case.method for case in DEFAULT if case.phase == "prompt"} == set(METHODS)
    assert str(Case("prompt", 64, "bf16", "h2o", "alibi")) == "D=64 bf16 h2o alibi"


def test_what_hinders_a_compilation_is_said(monkeypatch, capsys):
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    assert main([]) == 1 and "run make gpu-compile" in capsys.readouterr().err
    monkeypatch.setattr(compiler, "find_spec", lambda name: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main([]) == 1 and "unset it" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_every_specialisation_holds_the_bars():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    line = [sys.executable, "-m", "benchmarks.machine_code", "--all"]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
