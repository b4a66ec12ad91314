"""Files that somebody planted among the configurations: each would leave a folder behind if any of it were obeyed.

Every way a file can come in (a folder of one's own, another main file, a list of defaults, a search path) and every
place from which Hydra makes something run.
"""

from __future__ import annotations

import os
import pickle
import re

import pytest
from commands import run_py
from small import small
from turns import in_turn

from kvexp.run.guard import check_hydra, check_job, check_source
from kvexp.run.store import runs
from kvexp.util.errors import ConfigError
from kvexp.util.files import CONF

FEW = small("limit=1", "task.max_new_tokens=2", "task.nll=false", "method=full")
SECRET = "sk-0123456789abcdef0123456789abcdef"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """(marker, a folder of configurations, a package beside it that leaves the marker when it is imported)."""
    marker = tmp_path / "was_run"
    module = f"planted_{abs(hash(tmp_path))}"
    package = tmp_path / "site" / module
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"import os\nos.makedirs({str(marker)!r}, exist_ok=True)\n")
    (package / "config.yaml").write_text("a: 1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    return marker, tmp_path / "conf", module


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # where Hydra's own loggers write
    return lambda *words: run_py(monkeypatch, capsys, *words, *FEW, f"outputs_dir={tmp_path / 'out'}")


def refused(done, marker, tmp_path, *words):
    """The one line of a refusal; nothing was run, made or recorded."""
    code, out, err = done
    assert code == 1 and "Traceback" not in out + err, out + err
    assert not marker.exists(), "planted code was run"
    assert not list(runs(tmp_path / "out")) if (tmp_path / "out").exists() else True
    lines = [line for line in err.splitlines() if line]
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    for word in words:
        assert word in lines[0], lines[0]


MKDIR = "{_target_: os.mkdir, path: MARKER}"
PLANTED = {  # what stands in the file: what the refusal names
    "hydra: {callbacks: {evil: " + MKDIR + "}}": "hydra.callbacks.evil",
    "hydra: {callbacks: {table: {_target_: hydra_plugins.kvexp_shipping.os.mkdir, _args_: [MARKER]}}}": "callbacks",
    "hydra: {callbacks: '${evil}'}\nevil: {x: " + MKDIR + "}": "hydra.callbacks",
    "hydra: {callbacks: {evil: '${evil}'}}\nevil: " + MKDIR: "hydra.callbacks.evil",
    "hydra: {launcher: {_target_: os.mkdir}}": "hydra.launcher._target_",
    "hydra: {launcher: {_target_: '${evil}'}}\nevil: os.mkdir": "hydra.launcher._target_",
    "hydra: {launcher: {_target_: hydra_plugins.kvexp_shipping.os.mkdir, _args_: [MARKER]}}": "hydra.launcher._target_",
    "hydra: {launcher: {more: " + MKDIR + "}}": "hydra.launcher.more._target_",
    "hydra: {launcher: {initializer: MODULE}}": "hydra.launcher.initializer",
    "hydra: {launcher: {init: {runtime_env: {working_dir: /}}}}": "hydra.launcher.init.runtime_env",
    "hydra: {launcher: {slurm_setup: [mkdir MARKER]}}": "hydra.launcher.slurm_setup",
    "hydra: {launcher: {slurm_additional_parameters: {wrap: mkdir}}}": "slurm_additional_parameters.wrap",
    "hydra: {sweeper: {_target_: os.mkdir}}": "hydra.sweeper._target_",
    "hydra: {sweeper: {more: " + MKDIR + "}}": "hydra.sweeper.more._target_",
    "hydra: {job_logging: {handlers: {x: {class: MODULE.Handler}}}}": "hydra.job_logging",
    "hydra: {job_logging: {filters: {x: {(): os.mkdir, path: MARKER}}}}": "hydra.job_logging",
    "hydra: {hydra_logging: {handlers: {x: {class: logging.Handler, stream: ext://MODULE.x}}}}": "hydra.hydra_logging",
    "hydra: {hydra_logging: {formatters: {x: {(): os.mkdir, path: MARKER}}}}": "hydra.hydra_logging",
    "hydra: {job: {env_set: {PYTHONSTARTUP: MARKER}}}": "hydra.job.env_set",
    "hydra: {job: {env_copy: [HOME]}}": "env_copy",
    "log: {_target_: os.mkdir, path: MARKER}": "log._target_",
    "extra: [[{deep: " + MKDIR + "}]]": "extra[0][0].deep._target_",
}


@pytest.mark.parametrize(("planted", "mode"), in_turn(PLANTED, [(), ("-m",)], of=2))
def test_a_planted_file_runs_nothing(command, place, tmp_path, planted, mode):
    marker, conf, module = place
    text = planted.replace("MARKER", str(marker)).replace("MODULE", module)
    (conf / "experiment" / "evil.yaml").write_text(f"# @package _global_\n{text}\n")
    done = command(*mode, "--config-dir", str(conf), "experiment=evil")
    refused(done, marker, tmp_path, PLANTED[planted])


EVIL = "hydra: {callbacks: {evil: " + MKDIR + "}}"


@pytest.mark.parametrize("way", ["config_dir", "cd", "nested", "name", "path", "searchpath", "override", "logging"])
def test_whatever_way_it_comes_in(command, place, tmp_path, way):
    marker, conf, _ = place
    evil = EVIL.replace("MARKER", str(marker))
    (conf / "experiment" / "evil.yaml").write_text(f"# @package _global_\n{evil}\n")
    (conf / "experiment" / "outer.yaml").write_text("# @package _global_\ndefaults: [evil]\n")
    (conf / "main.yaml").write_text(f"defaults: [config, _self_]\n{evil}\n")
    (conf / "hydra" / "callbacks").mkdir(parents=True)
    (conf / "hydra" / "callbacks" / "evil.yaml").write_text(evil.removeprefix("hydra: {callbacks: ").removesuffix("}"))
    (conf / "hydra" / "job_logging").mkdir()
    (conf / "hydra" / "job_logging" / "mine.yaml").write_text("version: 1\nhandlers: {x: {class: os.mkdir}}\n")
    words = {
        "config_dir": ("--config-dir", str(conf), "experiment=evil"),
        "cd": (f"-cd={conf}", "experiment=evil"),
        "nested": ("--config-dir", str(conf), "experiment=outer"),
        "name": ("--config-dir", str(conf), "--config-name", "main"),
        "path": ("--config-path", str(conf), "--config-name", "main", f"hydra.searchpath=[{CONF}]"),
        "searchpath": (f"hydra.searchpath=[file://{conf}]", "experiment=evil"),
        "override": ("--config-dir", str(conf), "hydra/callbacks=evil"),
        "logging": ("--config-dir", str(conf), "hydra/job_logging=mine"),
    }[way]
    refused(command(*words), marker, tmp_path, "job_logging" if way == "logging" else "hydra.callbacks")


@pytest.mark.parametrize("way", ["searchpath", "file", "config_path"])
def test_no_package_is_imported_for_its_configurations(command, place, tmp_path, way):
    marker, conf, module = place
    (conf / "main.yaml").write_text(
        f"defaults: [config, _self_]\nhydra: {{searchpath: ['pkg://{module}', 'file://{CONF}']}}\n"
    )
    words = {
        "searchpath": (f"hydra.searchpath=[pkg://{module}]",),
        "file": ("--config-path", str(conf), "--config-name", "main"),
        "config_path": ("--config-path", f"pkg://{module}"),
    }[way]
    refused(command(*words), marker, tmp_path, f"pkg://{module}")


def test_the_environment_names_no_package_of_configurations(command, place, monkeypatch):
    """Hydra takes the main module's name from there and looks beside it; kvexp says itself where its own are."""
    marker, _, module = place
    monkeypatch.setenv("HYDRA_MAIN_MODULE", f"{module}.run")
    code, out, err = command()
    assert code == 0 and not marker.exists() and "full" in out, err


def test_a_pickled_job_is_not_taken_up(command, place, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(place[0]),)

    (tmp_path / "config.pickle").write_bytes(pickle.dumps(Evil()))
    done = command("--experimental-rerun", str(tmp_path / "config.pickle"))
    refused(done, place[0], tmp_path, "--experimental-rerun")


def test_only_the_command_line_trusts(command, place, tmp_path):
    """A file cannot say yes for whoever runs it."""
    marker, conf, _ = place
    for name, text in {
        "code": "model: {trust_remote_code: true}",
        "pickle": "model: {allow_pickle: '${agreed}'}\nagreed: true",
        "search": "hydra: {mode: MULTIRUN, sweeper: {params: {+model.trust_remote_code: 'true'}}}",
    }.items():
        (conf / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
        code, out, err = command("--config-dir", str(conf), f"experiment={name}")
        assert code == 1 and "stands in a configuration file" in err and "Traceback" not in err, err + out
        assert not list(runs(tmp_path / "out")) and not marker.exists()
    assert "stands in" not in command("model.trust_remote_code=true")[2]


def test_what_is_typed_is_trusted():
    """Lines for a shell before a SLURM task are an option of kvexp's: on the command line, not in a file."""
    node = {"launcher": {"_target_": "a.B", "slurm_setup": ["module load cuda"]}, "sweeper": {"_target_": "a.B"}}
    quiet = {"version": 1, "root": {"level": "ERROR"}, "disable_existing_loggers": True}
    node |= {"job_logging": quiet, "hydra_logging": quiet}
    known = {"launcher": ["a.B"], "sweeper": ["a.B"]}
    check_hydra(node, known, {"hydra.launcher.slurm_setup"})
    with pytest.raises(ConfigError, match="slurm_setup stands in a configuration file"):
        check_hydra(node, known, {"hydra.launcher.slurm_setu", "slurm_setup"})
    check_job({"task": {"tasks": ["piqa", "copa"]}}, set())
    check_job({"task": {"tasks": ["own.yaml"]}}, {"task.tasks"})
    with pytest.raises(ConfigError, match=re.escape("task.tasks=[own.yaml]")):
        check_job({"task": {"tasks": ["own.yaml"]}}, {"task"[:3]})


def test_folders_and_hydras_own_packages_are_searched():
    for path in ("file:///home/me/conf", "/home/me/conf", "structured://", "pkg://hydra.conf", "pkg://hydra_plugins.x"):
        check_source(path)
    for path in ("pkg://evil", "pkg://hydrant.conf", "pkg://", "pkg://evil/hydra"):
        with pytest.raises(ConfigError, match="imports no package"):
            check_source(path)


def test_a_line_end_in_an_option_reaches_no_shell(command):
    words = ("-m", "hydra/launcher=submitit_local", "hydra.launcher.submitit_folder='a\nmkdir b'")
    code, out, err = command(*words)
    assert code == 1 and "hydra.launcher.submitit_folder" in err and "line end" in err, out + err


@pytest.mark.parametrize("logging", ["stdout", pytest.param("default", marks=pytest.mark.slow)])
def test_hydras_own_logging_and_an_own_folder_go_on_working(stage, place, tmp_path, logging):
    """In a process of its own: Python's logging configurations close the streams of handlers that are there."""
    _, conf, _ = place
    (conf / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 3\nkv_ratio: ${oc.select:nothing,0.4}\n")
    out = tmp_path / "out"
    words = ("--config-dir", str(conf), "experiment=mine", f"hydra/job_logging={logging}", *FEW, f"outputs_dir={out}")
    code, said = stage.run(words, tmp_path / "log", f"import os; os.chdir({str(tmp_path)!r})")
    assert code == 0, said
    assert list(runs(out))


WORDS = (
    *("seed=${oc.env:PLANTED_KEY}", "seed='${oc.env:PLANTED_KEY,1}'", "+x=${oc.env:PLANTED_KEY}"),
    *("model.dtype=${oc.env:PLANTED_KEY}", "+a=oc|seed='${${a}.env:PLANTED_KEY}'"),
    *("seed='${oc.decode:${oc.env:PLANTED_KEY}}'", "hydra.sweep.dir=${oc.env:PLANTED_KEY}"),
    *("hydra.job.env_copy=[PLANTED_KEY]", "task=${oc.env:PLANTED_KEY}", "experiment=secret"),
)
MODES = ((), ("-m",), ("--cfg", "job", "--resolve"), ("--dry-run",))


@pytest.mark.parametrize(("word", "mode"), in_turn(WORDS, MODES, of=4))
def test_the_environment_reaches_no_message_and_no_file(command, place, tmp_path, monkeypatch, word, mode):
    _, conf, _ = place
    monkeypatch.setenv("PLANTED_KEY", SECRET)
    (conf / "experiment" / "secret.yaml").write_text("# @package _global_\nlog: {project: '${oc.env:PLANTED_KEY}'}\n")
    code, out, err = command(*mode, "--config-dir", str(conf), *word.split("|"))
    assert SECRET not in out + err
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file
    assert "Traceback" not in out + err, out + err
    if not word.startswith(("hydra.sweep", "task=")) or mode == ("-m",):  # else nothing asks for it
        assert code == 1 and (word.startswith("task=") or "environment" in err), err


def test_nothing_is_built_of_what_an_interpolation_hides(command, place, tmp_path):
    """An option of a launcher that kvexp lists, whose value is written elsewhere or as a text."""
    marker, conf, _ = place
    evil = MKDIR.replace("MARKER", str(marker))
    for value in ("'${evil}'", f"'${{oc.decode:\"{evil}\"}}'"):
        text = "# @package _global_\ndefaults: [{override /hydra/launcher: joblib}]\n"
        text += f"hydra: {{launcher: {{n_jobs: {value}}}}}\nevil: {evil}\n"
        (conf / "experiment" / "evil.yaml").write_text(text)
        done = command("-m", "--config-dir", str(conf), "experiment=evil")
        refused(done, marker, tmp_path, "hydra.launcher.n_jobs._target_", "os.mkdir")


def test_no_file_takes_the_name_of_a_method(command, place, tmp_path):
    marker, conf, _ = place
    (conf / "method").mkdir()
    (conf / "method" / "h2o.yaml").write_text("_target_: kvexp.methods.H2O\nrecent_ratio: 0.9\n")
    refused(command("--config-dir", str(conf), "seed=1"), marker, tmp_path, "method/h2o.yaml is called as an option of")
