"""Every option of every configuration group composes and builds, and every method class is one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from safetensors.torch import save_file
from small import small

import kvexp.tasks
from kvexp.run.build import build
from kvexp.run.compose import LISTED, listed, option, options
from kvexp.run.settings import settings_of
from kvexp.tasks.data import DataSource
from kvexp.util import ConfigError

CONF = Path(__file__).resolve().parents[2] / "conf"
GROUPS = {name: options(name) for name in (*LISTED, *(g.name for g in CONF.iterdir() if g.is_dir()))}


def composed(*overrides):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", small(*overrides))
    plain = OmegaConf.to_container(config, resolve=True)
    choices = dict(o.split("=", 1) for o in small(*overrides) if o.split("=")[0] in GROUPS)
    return {k: v for k, v in plain.items() if k not in ("log", "experiment")}, choices


@pytest.mark.parametrize("method", GROUPS["method"])
def test_methods(method, request):
    if method in ("qfilters", "triattention"):
        request.getfixturevalue("tiny_calibration")
    if method == "kvzap":
        request.getfixturevalue("tiny_surrogate")
    extra = ["cache.positions=original"] if method == "streaming_llm" else []
    settings = settings_of(*composed(f"method={method}", *extra))
    assert settings.labels["method"] == method
    fields = {f.name for f in dataclasses.fields(settings.method)}
    assert set(option("method", method)) - {"_target_"} == fields, "the option lists every setting of the method"
    if method != "h2o_keyformer_paper":
        assert settings.method == type(settings.method)(), "the option's values are the method's defaults"
        assert settings.method.name == method


def test_every_method_is_an_option():
    packages = (kvexp.methods, kvexp.retrieval)
    classes = {getattr(package, name).name for package in packages for name in package.__all__}
    assert classes | {"h2o_keyformer_paper"} == set(GROUPS["method"])


@pytest.mark.parametrize("budget", GROUPS["budget"])
def test_budgets(budget):
    settings = settings_of(*composed(f"budget={budget}", "kv_ratio=0.3"))
    assert settings.budget.kv_ratio == (None if budget in ("tokens", "threshold") else 0.3)


@pytest.mark.parametrize("generation", GROUPS["generation"])
def test_generations(generation):
    settings = settings_of(*composed(f"generation={generation}"))
    assert settings.decoding.max_new_tokens == settings.task.max_new_tokens


@pytest.mark.parametrize("task", GROUPS["task"])
def test_tasks(task):
    config, _ = composed(f"task={task}")
    built = build(config["task"], "task", within="kvexp.tasks")
    built.check_options()
    fields, given = {f.name for f in dataclasses.fields(built)}, set(config["task"]) - {"_target_"}
    assert given <= fields
    source = {f.name for f in dataclasses.fields(DataSource)}  # of no use to a task that makes its own rows
    missing = fields - given - {"limit", "shared_context"} - (source if built.generated else set())
    assert not missing, f"nobody should need a + on the command line for {sorted(missing)}"


def test_every_task_is_an_option():
    built = {node["_target_"].rpartition(".")[2] for node in listed("task").values()}
    bases = {"QuestionTask", "Summarization", "Task"}
    classes = {name for name in kvexp.tasks.__all__ if isinstance(getattr(kvexp.tasks, name), type)}
    assert built | bases == classes - {"Example"}


def test_model_options_say_that_an_open_revision_moves():
    for line in (CONF / "models.yaml").read_text().splitlines():
        if "revision: null" in line:
            assert "# null: whatever main is that day" in line


@pytest.mark.parametrize("model", GROUPS["model"])
def test_models(model, tmp_path, request):
    from kvexp.hf.patch import FAMILIES
    from kvexp.run.model_spec import ModelSpec

    config, _ = composed(f"model={model}", *([f"model.path={tmp_path}"] if model == "local" else []))
    if model == "local":
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        save_file({f"x{number}": torch.ones(1) for number in range(99)}, tmp_path / "model.safetensors")
    if str(config["model"].get("path")).startswith("pypi:"):
        request.getfixturevalue("wheels")  # a stand-in, for tests fetch nothing
    spec = ModelSpec.of(config["model"])
    assert spec.kind in ("pretrained", "random")
    assert spec.family in (None, *FAMILIES)


@pytest.mark.parametrize("experiment", GROUPS["experiment"])
def test_experiments(experiment):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", [f"experiment={experiment}"], return_hydra_config=True)
    assert config.hydra.mode.name == "MULTIRUN"
    assert config.hydra.sweeper.params


@pytest.mark.parametrize("pair", GROUPS["model_task"])
def test_pairs_name_a_model_and_a_task(pair):
    model = next(m for m in GROUPS["model"] if pair.startswith(f"{m}_") and pair[len(m) + 1 :] in GROUPS["task"])
    config, _ = composed(f"model={model}", f"task={pair[len(model) + 1 :]}")
    assert config["model"]["chat"] is True


def test_identity_leaves_out_what_cannot_change_a_number():
    one = settings_of(*composed("kv_ratio=0.3", "batch_size=4", "outputs_dir=elsewhere", "limit=2")).identity
    two = settings_of(*composed("kv_ratio=0.3")).identity
    assert one == two
    changes = "kv_ratio=0.4 seed=1 method.recent_ratio=0.4 cache.evict_every=2 generation.num_beams=2"
    for change in changes.split():
        assert settings_of(*composed("kv_ratio=0.3", change)).identity != two, change


def test_one_baseline_for_all_methods_and_budgets():
    changes = (["method=h2o", "kv_ratio=0.2"], ["method=keyformer", "kv_ratio=0.7", "seed=3"], ["method=full"])
    hashes = {str(settings_of(*composed(*c)).baseline().identity) for c in changes}
    assert len(hashes) == 1
    full = settings_of(*composed("method=full"))
    assert settings_of(*composed("method=full", "kv_ratio=0.9")).identity == full.identity


# protocol=PAPER: every preset composes, sets what its paper's script does, and refuses tasks it says nothing about.


FIXTURES = Path(__file__).parents[1] / "fixtures"
PAPERS = {
    name: yaml.safe_load((CONF / "protocol" / f"{name}.yaml").read_text())["protocol"] for name in GROUPS["protocol"]
}
PAIRS = [(paper, task) for paper, what in PAPERS.items() for task in what["tasks"]]
LOCAL = {
    **{name: f"task.data_files={FIXTURES}/{name}.jsonl" for name in ("cnn_dailymail", "xsum", "soda", "perplexity")},
    "govreport": f"task.data_files={FIXTURES}/longbench/qasper.jsonl",
    "longbench": f"task.data_files={FIXTURES}/longbench/qasper.jsonl",
    "gsm8k_cot": f"task.data_files={FIXTURES}/gsm8k.jsonl",
    "needle": f"task.haystack={FIXTURES}/haystack",
    "lm_eval": f"task.data_dir={FIXTURES}/lm_eval",
}


def preset(paper, task, *more):
    return settings_of(*composed(f"protocol={paper}", f"task={task}", LOCAL[task], *more))


def test_every_pair_is_listed_and_no_other():
    assert sorted(f"{paper}_{task}" for paper, task in PAIRS) == GROUPS["protocol_task"]
    assert all(what["paper"] == name for name, what in PAPERS.items())


@pytest.mark.parametrize(("paper", "task"), PAIRS)
def test_a_preset_composes_and_can_be_overruled(paper, task):
    settings = preset(paper, task)
    settings.task.check_options()
    plain = settings_of(*composed(f"task={task}", LOCAL[task]))
    assert (settings.identity == plain.identity) == ((paper, task) == ("pqcache", "longbench"))
    assert preset(paper, task, "seed=7", "limit=2").limit == 2


def test_keyformers_script():
    settings = preset("keyformer", "cnn_dailymail")
    task, decoding = settings.task, settings.decoding
    assert (task.sample, task.seed, settings.limit) == ("with_replacement", 12345, 1000)
    assert task.truncate == "right" and task.join_lines
    assert (decoding.num_beams, decoding.max_new_tokens, decoding.min_new_tokens) == (4, 128, 0)
    assert (settings.budget.of, settings.budget.kv_ratio) == ("padded", 0.6)
    assert (task.pad_to, task.max_prompt_tokens) == (1920, 1920)
    soda = preset("keyformer", "soda").task
    assert (soda.turn_separator, soda.join_lines, soda.sample) == ("", True, "with_replacement")
    report = preset("keyformer", "govreport").task
    assert (report.input_field, report.reference_field, report.hub_file) == ("context", "answers", "data.zip")
    assert {e.reference for e in report.examples()} == {"212", "no", "unanswerable"}  # each row's first answer


def test_h2os_script():
    settings = preset("h2o", "xsum")
    assert next(settings.task.examples()).prompt.startswith("###\nArticle: ")
    assert (settings.task.stop, settings.limit, settings.decoding.max_new_tokens) == ("###", 100, 64)
    assert (settings.decoding.sample, settings.decoding.temperature, settings.decoding.top_p) == (True, 0.3, 1.0)


def test_pqcaches_scripts():
    sums = preset("pqcache", "gsm8k_cot").task
    assert (sums.shots, sums.separator, sums.signed, sums.max_prompt_tokens) == (10, "\n", False, 31500)
    needle = preset("pqcache", "needle", "task.lengths=[500]").task
    assert len(needle.depths) == 11 and needle.max_new_tokens == 128
    config, _ = composed("protocol=pqcache", "task=needle")
    assert len(config["task"]["lengths"]) == 15 and max(config["task"]["lengths"]) == 30000
    for model, length in (("llama2_7b_chat", 3500), ("mistral_7b_instruct_v02", 32000)):
        config, _ = composed("protocol=pqcache", "task=longbench", f"model={model}")
        assert config["task"]["max_prompt_tokens"] == length
        assert config["task"]["chat_frame"] == "[INST]{prompt}[/INST]"


def test_streaming_llms_experiment():
    settings = preset("streaming_llm", "perplexity")
    assert settings.cache.beyond_context and settings.budget.tokens == settings.task.prefill_tokens == 1024
    assert (settings.task.total_tokens, settings.limit) == (20000, 1)


@pytest.mark.parametrize(("paper", "task"), [("keyformer", "longbench"), ("h2o", "cnn_dailymail"), ("pqcache", "xsum")])
def test_a_preset_for_another_task_is_refused(paper, task):
    listed = ", ".join(PAPERS[paper]["tasks"])
    with pytest.raises(ConfigError, match=f"protocol={paper} has no settings for task={task}; it has for {listed}"):
        settings_of(*composed(f"protocol={paper}", f"task={task}", LOCAL[task]))


def test_without_a_protocol_nothing_is_set():
    config, _ = composed("task=cnn_dailymail")
    assert config["task"]["truncate"] == "middle" and config["generation"]["num_beams"] == 1
    assert config.get("protocol") is None
