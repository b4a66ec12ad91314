"""protocol=PAPER: every preset composes, sets what its paper's script does, and refuses tasks it says nothing about."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from test_conf import CONF, GROUPS, composed

from kvexp.run.settings import settings_of
from kvexp.util import ConfigError

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
    assert settings.identity != settings_of(*composed(f"task={task}", LOCAL[task])).identity or (paper, task) == (
        *("pqcache", "longbench"),
    )
    assert preset(paper, task, "seed=7", "limit=2").limit == 2


def test_keyformers_script():
    settings = preset("keyformer", "cnn_dailymail")
    task, decoding = settings.task, settings.decoding
    assert (task.sample, task.seed, settings.limit, task.truncate, task.join_lines) == (
        *("with_replacement", 12345, 1000, "right", True),
    )
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
