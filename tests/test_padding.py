"""task.pad_to: budgets of the padded prompt, without a pad in the cache; the same slots as with real pads."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from kvexp.config.group_checks import batch_budget
from kvexp.config.model_spec import load
from kvexp.config.settings import settings_of
from kvexp.errors import ConfigError
from kvexp.evaluate.evaluate_run import evaluate_run
from kvexp.evaluate.outputs import sampling_seed
from kvexp.generate import generate, receipts

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["model=tiny", "task=sample", "limit=2", "task.max_new_tokens=4", "task.nll=false"]


def settings(outputs, *overrides):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = OmegaConf.to_container(compose("config", [*SMALL, f"outputs_dir={outputs}", *overrides]), resolve=True)
    return settings_of({k: v for k, v in config.items() if k not in ("log", "experiment")}, {}, overrides)


@pytest.mark.parametrize("extra", [[], ["method=keyformer", "method.tau_end=1.0"], ["budget.pyramid=0.5"]])
def test_the_slots_are_those_of_a_prompt_with_real_pads(tmp_path, extra):
    made = settings(tmp_path, "kv_ratio=0.5", "budget.of=padded", "task.pad_to=420", *extra)
    rows = evaluate_run(made).rows()
    model, tokenizer = load(made.model)
    for row, example in zip(rows, made.task.examples(), strict=True):
        prompt = tokenizer(example.prompt).input_ids
        assert len(prompt) < 420
        padded = generate(
            model,
            [prompt, [7] * 420],  # a neighbour of 420 tokens pads the prompt to 420 columns
            made.cache,
            decoding=made.decoding,
            tokenizer=tokenizer,
            seeds=[sampling_seed(made, example), 0],
        )
        receipt = receipts(padded.cache)[0]
        assert (row["receipt"]["kept_digest"], row["receipt"]["slots"]) == (receipt.kept_digest, receipt.slots)
        assert row["output"] == tokenizer.decode(padded.tokens[0], skip_special_tokens=True)
        if "budget.pyramid=0.5" not in extra:
            assert row["receipt"]["slots"] == 420 // 2 - 1  # the token to come has the last slot
        assert row["receipt"]["peak_kv_bytes"] < receipt.peak_kv_bytes, "pads hold no memory"


def test_a_prompt_that_loses_only_pads_loses_nothing(tmp_path):
    rows = evaluate_run(settings(tmp_path, "kv_ratio=0.5", "budget.of=padded", "task.pad_to=2000")).rows()
    assert [row["receipt"]["first_eviction_step"] for row in rows] == [None, None]
    assert all(row["receipt"]["slots"] == row["prompt_tokens"] + row["new_tokens"] - 1 for row in rows)


def test_padding_is_another_run_and_its_baseline_another_baseline(tmp_path):
    plain, padded = (settings(tmp_path, "kv_ratio=0.5", *more) for more in ([], ["budget.of=padded", "task.pad_to=99"]))
    assert plain.identity != padded.identity and batch_budget(plain, [5, 9]) is plain.budget
    assert batch_budget(padded, [5, 99]).tokens == 49 and batch_budget(padded, [200]).tokens == 100
    with pytest.raises(ConfigError, match="prompts padded to 99 and 120 tokens in one batch: set batch_size=1"):
        batch_budget(padded, [5, 120])
    assert batch_budget(padded.baseline(), [5, 120]) is None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["task.pad_to=400"], "budget.of=prompt leaves them out: set budget.of=padded, or task.pad_to=null"),
        (["task.pad_to=400", "budget.of=sequence"], "budget.of=sequence leaves them out"),
        (["budget.of=padded", "batch_size=2"], "batch_size must be 1 with budget.of=padded, got 2"),
        (["budget.of=padded", "batch_size=2", "task.pad_to=400"], "unless task.pad_to is task.max_prompt_tokens"),
        (["method=h2o_keyformer_paper", "batch_size=2"], "batch_size must be 1 with method.score_batch=sum_all, got 2"),
        (["task.pad_to=0", "budget.of=padded"], "task.pad_to must be at least 1, got 0"),
        (["task.pad_to=9", "task.max_prompt_tokens=8", "budget.of=padded"], "task.pad_to=9 is above"),
    ],
)
def test_padding_that_would_do_nothing_or_mix_rows_is_refused(tmp_path, overrides, words):
    with pytest.raises(ConfigError, match=words):
        settings(tmp_path, *overrides).task.check_options()


def test_prompts_of_one_width_may_share_a_batch(tmp_path):
    width = ["budget.of=padded", "task.pad_to=420", "task.max_prompt_tokens=420", "kv_ratio=0.5"]
    one, two = (evaluate_run(settings(tmp_path / size, *width, f"batch_size={size}")).rows() for size in "12")
    for a, b in zip(one, two, strict=True):
        assert (a["output"], a["receipt"]["kept_digest"]) == (b["output"], b["receipt"]["kept_digest"])
