"""lm-eval's tasks that make their rows, its further scores, splits and missing packages; IFEval's lists."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from commands import composed

from kvexp.run.settings import settings_of
from kvexp.tasks import lm_eval as definition
from kvexp.tasks.lm_eval import LMEval, Making, mend
from kvexp.util.errors import ConfigError

pytest.importorskip("lm_eval", reason="lm-eval is not installed; it comes with kvexp[eval]")

YAML = """
task: made
custom_dataset: !function making.rows
output_type: generate_until
test_split: test
doc_to_text: "{{input}}"
doc_to_target: "{{outputs}}"
process_results: !function making.process
generation_kwargs: {until: [], max_gen_toks: 4, do_sample: false}
metric_list:
  - metric: "4096"
    aggregation: mean
    higher_is_better: true
"""
PYTHON = """
import random
import datasets
import numpy as np
from transformers import AutoTokenizer

OWN = random.Random(42)

def rows(max_seq_lengths=(4096,), tokenizer=None, **_):
    count = AutoTokenizer.from_pretrained(tokenizer)
    made = []
    for length in max_seq_lengths:
        for _ in range(3):
            words = ""
            while len(count(words).input_ids) < length:
                words += f" {random.randint(0, 9)}{np.random.randint(9)}{OWN.randint(0, 9)}"
            made.append({"input": words, "outputs": [words[-1]], "max_length": length})
    return {"test": datasets.Dataset.from_list(made)}

def process(doc, results):
    return {"4096": -1.0, str(doc["max_length"]): float(doc["outputs"][0] in results[0])}
"""


@pytest.fixture
def made(tmp_path: Path) -> str:
    (tmp_path / "making.py").write_text(PYTHON)
    (tmp_path / "made.yaml").write_text(YAML)
    return str(tmp_path / "made.yaml")


@pytest.fixture
def task(made: str, stories260k: str) -> LMEval:
    return LMEval(tasks=(made,), metadata={"max_seq_lengths": [24]}, tokenizer=str(stories260k))


def prompts(task: LMEval) -> list[str]:
    return [example.prompt for example in task.examples()]


def test_rows_are_the_same_whatever_was_drawn_before(task):
    definition.load_once.cache_clear()
    first = prompts(task)
    random.seed(99), np.random.seed(99)
    state = random.getstate()
    definition.load_once.cache_clear()
    assert prompts(task) == first
    assert random.getstate() == state  # nobody else's draws are moved
    assert prompts(replace(task, data_seed=1)) != first
    assert len(set(first)) == 3


def test_tokenizer_lengths_and_seed_reach_the_rows_and_the_fingerprint(task, tmp_path, stories260k):
    longer = replace(task, metadata={"max_seq_lengths": [48]})
    assert min(map(len, prompts(longer))) > max(map(len, prompts(task)))
    other = tmp_path / "tokenizer"
    other.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_bytes((Path(stories260k) / name).read_bytes())
    same = replace(task, tokenizer=str(other))
    (other / "special.json").write_text("{}")
    marks = {each.fingerprint() for each in (task, longer, same, replace(task, data_seed=1))}
    assert len(marks) == 4
    assert replace(task).fingerprint() == task.fingerprint()


def test_the_command_line_gives_the_models_own_tokenizer(made, stories260k):
    words = ("task=lm_eval", f"task.tasks=[{made}]", "task.metadata={max_seq_lengths:[24]}", "model=local")
    config, choices = composed(*words, f"model.path={stories260k}")
    settings = settings_of(config, choices)
    assert settings.task.tokenizer is not None
    assert len(prompts(settings.task)) == 3
    assert "tokenizer" not in settings.identity["task"]
    assert settings.identity["task"]["metadata"] == {"max_seq_lengths": [24]}
    plain, choices = composed("task=lm_eval", "task.tasks=[piqa]")
    assert not {"metadata", "data_seed", "tokenizer"} & set(settings_of(plain, choices).identity["task"])


def test_a_placeholder_is_no_result(task):
    (item, *_) = task.examples()
    assert task.score_item(item, [item.reference]) == {"24": 100.0}
    assert task.score_item(item, [""]) == {"24": 0.0}


def test_a_list_is_kept_and_its_share_is_the_score():
    class Task:
        class config:
            task = "ifeval"

        _instances: list[object]

        def apply_filters(self):
            self._instances[0].filtered_resps = {"none": "answer"}

        def process_results(self, doc, results):
            return {"prompt_level_strict_acc": False, "inst_level_strict_acc": [True, False, True], "none_of_it": []}

        def higher_is_better(self):
            return {}

    item = definition.Item("a", "p", "r", instances=(SimpleNamespace(doc={}),))
    metrics, lists = definition.outcome(Task(), item, ["answer"])
    assert metrics == {"prompt_level_strict_acc": 0.0, "inst_level_strict_acc": pytest.approx(200 / 3)}
    assert lists == {"inst_level_strict_acc": [True, False, True]}


def test_a_split_of_the_tasks_own_name(tmp_path):
    config = {
        "task": "infinitebench_passkey",
        "dataset_path": "xinrongzhang2022/InfiniteBench",
        "test_split": "passkey",
    }
    with pytest.raises(ConfigError, match=r"SPLIT one of passkey, train, validation, test"):
        definition.files_of(config, str(tmp_path))
    (tmp_path / "infinitebench_passkey.passkey.jsonl").write_text('{"id": 0}\n')
    found = definition.files_of(config, str(tmp_path))
    assert set(found) == {"passkey"}
    changes = definition.overrides(config, found, 0, None)
    assert set(changes["dataset_kwargs"]["data_files"]) == {"passkey"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data_dir": "."}, "makes its rows in Python .making.rows., and reads no files"),
        ({"metadata": {"max_seq_lengths": [24, 48]}}, "one length a run, .* got max_seq_lengths=.24, 48."),
        ({"metadata": {"max_seq_length": [24]}}, "no metadata max_seq_length, .* write max_seq_lengths"),
        ({"tokenizer": None}, "cannot make lm-eval's task made: .*task.metadata={max_seq_lengths"),
        ({"tasks": ("piqa",)}, "task.metadata and task.data_seed are for tasks that make their rows"),
        ({"metadata": {"no_such": 1}, "tasks": ("piqa",)}, "piqa reads them: leave both out"),
    ],
)
def test_what_cannot_be_made_is_refused(task, options, words):
    with pytest.raises(ConfigError, match=words):
        replace(task, **options).check()


def test_what_is_missing_is_named():
    def chained(first: BaseException, second: BaseException) -> BaseException:
        try:
            raise first from second
        except type(first) as error:
            return error

    missing = chained(ImportError("Please install"), ModuleNotFoundError("No module", name="wonderwords"))
    assert mend(missing) == "Install what it needs: pip install kvexp[benchmarks]"
    assert mend(ModuleNotFoundError("x", name="jieba.posseg")) == "Install what it needs: pip install jieba"
    assert "take task=math500" in mend(ImportError("`antlr4-python3-runtime==4.11` is needed"))
    assert mend(LookupError("Resource punkt_tab not found.")).endswith("python -m nltk.downloader punkt_tab")
    assert mend(ValueError("other")) == ""


def test_the_command_makes_rows_once_and_lm_eval_reads_those(made, task, tmp_path, stories260k):
    """The definition that is written reads the rows that were made, for the same tokenizer, lengths and seed."""
    loaded = definition.load(made, making=Making('{"max_seq_lengths": [24]}', str(stories260k)))
    folder = tmp_path / "out"
    folder.mkdir()
    path = definition.rows_file(folder, made, loaded)
    again = definition.load(str(path))
    assert [doc["input"] for doc in again.dataset["test"]] == prompts(task)
    assert json.loads(path.read_text())["custom_dataset"] is None


def test_a_task_that_cannot_lose_anything_is_refused():
    """One letter by log-likelihood is the full prefill's; LongBench v2 is generated by kvexp's own task."""
    name = next(name for name in definition.matching("longbench2_*"))
    with pytest.raises(ConfigError, match=r"no method can lose anything there\. Take task=longbench_v2"):
        LMEval(tasks=(name,)).check()
    definition.check_feels_eviction(name, "h2o")
