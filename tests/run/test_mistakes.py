"""What is typed wrong: one message of a line or two, before torch is imported, with what was probably meant."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from commands import run_py

from kvexp.results.views import main as results
from kvexp.run.build import keys_named, with_keys
from kvexp.run.compose import check_keys, settings, unknown
from kvexp.run.labels import check_values
from kvexp.run.store import refusals, runs
from kvexp.util.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]

TYPED = [  # words, what stderr holds
    (["method=h20"], "there is no method=h20; did you mean h2o"),
    (["-m", "method=h2o,h20"], "there is no method=h20; did you mean h2o"),
    (["task=cnn"], "there is no task=cnn"),
    (["model=gpt5"], "there is no model=gpt5"),
    (["hydra/launcher=jolib"], "there is no hydra/launcher=jolib; did you mean joblib?"),
    (["experiment=keyformer_fig"], "did you mean keyformer_fig"),
    (["method="], "method= names no option"),
    (["metod=h2o"], "there is no setting metod; did you mean method"),
    (["limt=3"], "there is no setting limt; did you mean limit?"),
    (
        ["method.alpha=0.5"],
        "method.alpha is a setting of method=a2sf,caote,keyformer_a2sf, not of method=h2o: add method=a2sf or one of "
        "the others",
    ),
    (["method.recent_rato=0.5"], "there is no setting method.recent_rato; did you mean method.recent_ratio?"),
    (["task=testbed_summary", "task.nosuch=1"], "there is no setting task.nosuch; task=testbed_summary has split, "),
    (["+max_new_tokens=32"], "did you mean task.max_new_tokens or generation.max_new_tokens?"),
    (["max_new_tokens=32"], "did you mean task.max_new_tokens or generation.max_new_tokens?"),
    (["+methods=h2o"], "there is no setting methods; did you mean method?"),
    (["+log.wandbs=true"], "there is no setting log.wandbs; did you mean log.wandb?"),
    (["method=h2o,a2sf"], "method=h2o,a2sf is several values: add -m for a run of each"),
    (["kv_ratio=0,5"], "kv_ratio=0,5 is two values: write kv_ratio=0.5"),
    (["h2o"], "expected KEY=VALUE without spaces, got h2o; did you mean method=h2o"),
    (["limit", "=", "3"], "expected KEY=VALUE without spaces, got limit; did you mean limit=VALUE?"),
    (["task.data_files=a=b"], "quote it twice, as in \"task.data_files='a=b'\""),
    (["+method=h2o"], "method is there already: method=VALUE sets it, without + in front"),
    (["~limits"], "there is no setting limits; did you mean limit"),
    (["--limit=3"], "--limit=3: settings have no dashes, write limit=3"),
    (["--dry-rn"], "there is no option --dry-rn; did you mean --dry-run"),
    (["kv_ratio=20"], "kv_ratio must be in (0, 1], got 20; 20 % is kv_ratio=0.2"),
    (["kv_ratio=abc"], "kv_ratio must be a number, got 'abc'"),
    (["budget.kv_ratio=50"], "budget.kv_ratio must be in (0, 1], got 50; 50 % is budget.kv_ratio=0.5"),
    (["limit=abc"], "error: limit must be a whole number or null, got 'abc'"),
    (["budget.tokens=128"], "budget.tokens=128 needs budget=tokens"),
    (["budget=tokens", "budget.kv_ratio=0.2"], "budget=tokens takes no ratio, got budget.kv_ratio=0.2"),
    (["budget=tokens", "kv_ratio=0.2"], "kv_ratio has no effect with budget=tokens; leave out kv_ratio=0.2, or take"),
    (["budget=threshold", "budget.threshold=0.1", "kv_ratio=0.2"], "leave out kv_ratio=0.2, or take budget=ratio"),
    (["budget=tokens", "budget.of=padded"], "budget.of has no effect with budget=tokens"),
    (["device=cpu"], "there is no setting device; did you mean model.device?"),
    (["dtype=int8"], "there is no setting dtype; did you mean model.dtype?"),
    (["model=local"], "model.path has no value; set it on the command line, model.path=VALUE"),
    (["seed=${nowhere}"], "seed cannot be: Interpolation key 'nowhere' not found"),
]


@pytest.mark.parametrize(("typed", "said"), TYPED, ids=[" ".join(typed) for typed, _ in TYPED])
def test_a_mistake_is_one_short_message(monkeypatch, capsys, tmp_path, typed, said):
    code, out, err = run_py(monkeypatch, capsys, *typed, f"outputs_dir={tmp_path}")
    assert code == 1 and said in err and err.count("error: ") == 1
    assert len(err.splitlines()) <= 2 and out == "" and not list(runs(tmp_path))


def test_torch_is_not_imported_for_it(tmp_path):
    (tmp_path / "empty").mkdir()
    mistakes = [["kv_ratio=20"], ["+max_new_tokens=32"], ["method=h20"], ["task.max_new_tokens=0"], ["model=/nowhere"]]
    mistakes += [[f"model={tmp_path}/empty"], ["task=stories", "task.data_files=/nowhere.jsonl"]]
    code = f"""import runpy, sys
for words in {mistakes!r}:
    sys.argv = ['run.py', *words, 'outputs_dir={tmp_path}']
    try: runpy.run_path('run.py', run_name='__main__')
    except SystemExit as end: print(end.code, {{'torch', 'pandas'}} & set(sys.modules))"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["1 set()"] * len(mistakes), done.stderr
    assert done.stderr.count("error: ") == len(mistakes), done.stderr


def test_a_sweep_tells_each_reason_once_and_lists_its_failed_jobs(monkeypatch, capsys, tmp_path):
    code, out, err = run_py(monkeypatch, capsys, "-m", "kv_ratio=20,30", f"outputs_dir={tmp_path}")
    assert code == 1 and err.count("got 20") == err.count("got 30") == 1
    assert "2 run(s) failed:" in out and "got " not in out
    assert len(list(refusals(tmp_path))) == 2


def test_keys_of_an_experiment_are_known_too(monkeypatch, capsys, tmp_path):
    """A composed file sets what the command line may set and nothing else."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nmax_new_tokens: 32\n")
    words = [f"--config-dir={tmp_path}", "experiment=mine", f"outputs_dir={tmp_path / 'out'}"]
    code, _, err = run_py(monkeypatch, capsys, *words)
    assert code == 1 and "there is no setting max_new_tokens; did you mean task.max_new_tokens" in err


TESTBED = ("model=testbed_rope", "task=testbed_summary")
KEYS = [  # key and value typed, what is said once torch is there
    (["generation.num_beams=0"], "error: generation.num_beams must be in [1, 1024], got 0"),
    (["generation=sampling", "generation.num_beams=2"], "error: sampling with beams is not offered: set generation."),
    (["task.max_new_tokens=0"], "error: task.max_new_tokens must be at least 1, got 0"),
    (["method=full", "budget.heads=adaptiv"], "error: budget.heads must be one of uniform, union, "),
    (["method=full", "select.by=chunks"], "error: select.by must be one of token, chunk, got 'chunks'"),
    (["cache.evict_at_prefill=false", "cache.evict_every=null"], "set cache.evict_at_prefill=true or cache.evict_e"),
    (["method=ideal", "cache.mode=overwrite"], "error: method ideal with these settings simulates and drops"),
    (["method=keyformer", "method.tau_init=0"], "error: method.tau_init must be above 0, got 0"),
    (["model.dtype=int8"], "error: model.dtype must be one of float32, bfloat16, float16, got 'int8'"),
]


@pytest.mark.parametrize(("typed", "said"), KEYS, ids=[" ".join(typed) for typed, _ in KEYS])
def test_an_error_names_the_key_as_it_is_typed(monkeypatch, capsys, tmp_path, typed, said):
    code, _, err = run_py(monkeypatch, capsys, *TESTBED, *typed, "limit=1", f"outputs_dir={tmp_path}")
    assert code == 1 and said in err and len(err.splitlines()) == 1 and not list(runs(tmp_path))


def test_only_what_is_a_settings_name_is_one():
    keys = {"mode": "cache.mode", "num_beams": "generation.num_beams", "tokens": "budget.tokens"}
    told = with_keys("tokens of a mode: set mode=mask, no num_beams, as 'num_beams' or task.tokens=mode say", keys)
    assert told == (
        "budget.tokens of a mode: set cache.mode=mask, no generation.num_beams, as 'num_beams' or task.tokens=mode say"
    )
    with pytest.raises(ConfigError, match=r"^budget: too few tokens$"), keys_named(keys, "budget"):
        raise ConfigError("too few tokens")


def test_every_key_of_the_defaults_is_known():
    assert settings()["kv_ratio"] == () and "h2o" in settings()["method.recent_ratio"]
    check_keys({"model": {}, "log": {"wandb": True, "project": "", "mode": "auto"}})
    with pytest.raises(ConfigError, match="there is no setting outputdir; did you mean outputs_dir"):
        check_keys({"outputdir": "x"})
    assert unknown("nonsense", {}) == "there is no setting nonsense; kvexp run --help lists the settings"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("limit", 0, "limit must be at least 1 or null, got 0"),
        ("seed", -1, "seed must be at least 0, got -1"),
        ("retry", "yes", "retry must be true or false, got 'yes'"),
        ("threads", 0, "threads must be at least 1 or null, got 0"),
        ("budget", {"kv_ratio": 120}, r"budget.kv_ratio must be in \(0, 1\], got 120$"),
        ("budget", {"kv_ratio": True}, "budget.kv_ratio must be a number"),
    ],
)
def test_values(name, value, said):
    plain = {"outputs_dir": "o", "limit": None, "seed": 0, "batch_size": 1, "retry": False}
    check_values(plain, {})
    with pytest.raises(ConfigError, match=said):
        check_values({**plain, name: value}, {})


def test_a_choice_of_results_that_leaves_none_lists_what_there_is(monkeypatch, capsys, tmp_path):
    run_py(monkeypatch, capsys, "-m", "method=h2o,a2sf", "kv_ratio=20", f"outputs_dir={tmp_path}")
    assert results([str(tmp_path), "--where", "method=h20"]) == 1
    assert capsys.readouterr().out == f"no run under {tmp_path} has method=h20; there are method=a2sf,h2o\n"
    assert results([str(tmp_path), "--where", "method=h2o", "kv_ratio=0.5", "status=done"]) == 1
    out = capsys.readouterr().out
    assert "has kv_ratio=0.5; there are kv_ratio=20; no run" in out and "there are status=refused" in out


def test_a_folder_that_looks_like_markup_is_printed_as_it_is(capsys, monkeypatch, tmp_path):
    folder = tmp_path / "[red]x" / "[" / "a]"
    words = ["model=tiny", "task=sample", "method=full", "limit=1", "task.max_new_tokens=2", "task.nll=false"]
    code, out, err = run_py(monkeypatch, capsys, *words, f"outputs_dir='{folder}'")
    assert code == 0, err
    assert "kvexp report " in out and "[red]x/[/a]" in "".join(out.split("\n"))
    assert results([str(folder)]) == 0


@pytest.mark.parametrize("lines", [20, 5000])
def test_output_that_nobody_reads_ends_the_command_quietly(lines):
    """The pipe breaks while it prints, or at the end, where what was buffered is written."""
    code = "from kvexp.util.output import watch_pipes; watch_pipes()\nimport sys; sys.stdin.read()\n"
    code += f"for _ in range({lines}): print('x' * 40)"
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **options) as made:
        made.stdout.close()
        made.stdin.close()
        assert made.stderr.read() == b""
    assert made.returncode == 141


def test_every_command_line_watches_its_pipe():
    for path in [ROOT / "run.py", *(ROOT / "kvexp").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        if '__name__ == "__main__"' in text and path.name != "trace_check.py":  # engines copy it
            assert "    watch_pipes()" in text or "from kvexp.cli import" in text, path  # which watches
