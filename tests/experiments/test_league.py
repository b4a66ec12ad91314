"""The league: entries say what was run, are measured again, and a wrong or hostile one is refused."""

from __future__ import annotations

import copy
import json
import re

import pytest
from commands import config_of
from omegaconf import OmegaConf
from test_sweep_divergence import QUESTIONS, SUMMARY, group

from experiments.studies.league import (
    BEGIN,
    END,
    NUMBERS,
    SAFETY,
    UNMEASURED,
    check_entry,
    drawn_rows,
    entries_in,
    entry_of,
    entry_settings,
    html_page,
    main,
    markdown,
    read_entry,
    tolerance_file,
    tolerance_of,
    words_of,
    write_entry,
)
from kvexp.diagnose.case import rows_of
from kvexp.run.batches import run_group
from kvexp.run.compose import with_user_methods
from kvexp.run.jobs import HydraJob, run_job
from kvexp.run.store import DIVERGENCE, runs
from kvexp.util import ConfigError, Session, active, keys_of


def command(outputs, *words):
    """`kvexp run` of the testbed's model, in this process."""
    given = ["model=testbed_rope", "task=testbed_summary", "task.max_new_tokens=8", "limit=4", "kv_ratio=0.3"]
    given += [f"outputs_dir={outputs}", "divergence=true", *with_user_methods(words)]
    config = config_of(*given, return_hydra_config=True)
    choices = {key: value for key, value in config.hydra.runtime.choices.items() if value is not None}
    plain = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
    with active(Session(typed_keys=keys_of(given))) as session:
        run_job(HydraJob(plain, given, choices, None), session)
        assert not session.failures


@pytest.fixture(scope="module")
def league(tmp_path_factory):
    """A league of one entry, made as a user makes it."""
    folder = tmp_path_factory.mktemp("league")
    command(folder / "outputs", "method=h2o")
    (run,) = (run for run in runs(folder / "outputs") if run.baseline is not None)
    assert main(["submit", str(run.path), "--league", str(folder / "league")]) == 0
    ((file, entry),) = entries_in(folder / "league")
    return folder / "league", file, entry, run


def test_an_entry_says_what_was_run_and_holds_no_path(league):
    _, file, entry, run = league
    assert entry["hash"] == run.hash and entry["baseline"] == run.baseline and entry["code"] is None
    assert "method=h2o" in entry["words"] and "task.max_new_tokens=8" in entry["words"]
    text = file.read_text("utf-8")
    assert str(run.path.parent) not in text and "outputs_dir" not in text and "limit" not in entry["words"]
    lines = {line["example"]: line for line in run.divergence().values()}
    for row in entry["rows"]:
        line = lines[row["example"]]
        assert row["tokens"] == line["tokens"] and row["first_by_prefill"] is True
        assert row["kl"] == pytest.approx(sum(line["kl"][1:]) / (len(line["kl"]) - 1), rel=1e-5)
        assert row["prompt_digest"] == rows_of(run)[row["example"]]["prompt_digest"]
    assert entry["kl"] > 0 and 0 < entry["kv_bytes"] < entry["full_kv_bytes"]


def test_its_rows_are_measured_again_and_are_the_same(league, capsys):
    folder, _, entry, _ = league
    assert main(["check", "--league", str(folder), "--rows", "3", "--outputs"]) == 0
    assert "ok, 3 rows" in capsys.readouterr().out
    assert [row["example"] for row in drawn_rows(entry, 3, 0)] == [row["example"] for row in drawn_rows(entry, 3, 0)]
    drawn = {tuple(row["example"] for row in drawn_rows(entry, 2, seed)) for seed in range(20)}
    assert len(drawn) > 2 and all(len(each) == 2 for each in drawn)


def test_an_entry_that_says_other_numbers_is_refused(league, tmp_path, capsys):
    _, _, entry, _ = league
    wrong = copy.deepcopy(entry)
    for row in wrong["rows"]:
        row |= {name: row[name] - 2 * UNMEASURED[name] for name in NUMBERS}
    write_entry(tmp_path, wrong)
    assert main(["check", "--league", str(tmp_path), "--rows", "1"]) == 1
    told = capsys.readouterr().out
    assert "REFUSED" in told and all(f"{name} is" in told for name in NUMBERS) and "in the entry" in told


def test_another_prompt_and_other_settings_are_refused(league, tmp_path, capsys):
    _, _, entry, _ = league
    for place, change, told in (
        ("prompt", lambda one: [row.update(prompt_digest="0" * 16) for row in one["rows"]], "has the digest"),
        ("words", lambda one: one["words"].append("method.recent_ratio=0.25"), "words make the run"),
        ("example", lambda one: [row.update(example="nobody") for row in one["rows"]], "no example nobody"),
    ):
        wrong = copy.deepcopy(entry)
        change(wrong)
        write_entry(tmp_path / place, wrong)
        assert main(["check", "--league", str(tmp_path / place), "--rows", "1"]) == 1
        assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    "word", ["model.trust_remote_code=true", "+method_file=/tmp/x.py", "method=somewhere.Method", "task.tasks=[x.yaml]"]
)
def test_no_word_of_an_entry_loads_code(league, tmp_path, word, monkeypatch, capsys):
    _, _, entry, _ = league
    monkeypatch.setattr("kvexp.diagnose.case.load", lambda *_: pytest.fail("a model was loaded"))
    wrong = copy.deepcopy(entry)
    wrong["words"] = [*(each for each in entry["words"] if not each.startswith("method=")), word]
    write_entry(tmp_path, wrong)
    assert main(["check", "--league", str(tmp_path)]) in (1, 2)
    assert "ok," not in capsys.readouterr().out


@pytest.mark.slow
def test_a_users_method_is_run_only_where_its_file_is_named(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\nfrom kvexp.core import Method\nfrom kvexp.core.method import recency\n\n\n"
        "@dataclass(frozen=True)\nclass Mine(Method):\n    'Keeps the newest.'\n\n    def priority(self, ctx):\n"
        "        return recency(ctx)\n"
    )
    command(tmp_path / "outputs", f"+method_file={file}")
    (run,) = (run for run in runs(tmp_path / "outputs") if run.baseline is not None)
    league = tmp_path / "league"
    assert main(["submit", str(run.path), "--league", str(league)]) == 0
    assert "code of yours (mine.Mine of mine.py)" in " ".join(capsys.readouterr().out.split())
    ((_, entry),) = entries_in(league)
    assert entry["code"] and str(tmp_path) not in json.dumps(entry)
    assert main(["check", "--league", str(league)]) == 1
    assert "a user's code: name it" in capsys.readouterr().out
    assert main(["check", "--league", str(league), "--built-in"]) == 0
    assert "passed over" in capsys.readouterr().out
    assert main(["check", "--league", str(league), "--method-file", str(file)]) == 0
    assert "ok, 4 rows" in capsys.readouterr().out
    file.write_text(file.read_text() + "# a remark changes nothing\n")
    assert main(["check", "--league", str(league), "--method-file", str(file)]) == 0
    file.write_text(file.read_text().replace("recency(ctx)", "0 + recency(ctx)"))
    assert main(["check", "--league", str(league), "--method-file", str(file)]) == 1


@pytest.mark.slow
def test_questions_after_the_eviction_are_checked_too(tmp_path):
    run_group(group(tmp_path, *QUESTIONS, methods=("h2o",)), Session())
    run = next(run for run in runs(tmp_path) if run.baseline is not None)
    entry = entry_of(run) | {"hash": run.hash}
    assert entry["question"] == "after_eviction" and not any(row["first_by_prefill"] for row in entry["rows"])
    settings = entry_settings(entry | {"words": ["model=testbed_rope", "method=h2o", "kv_ratio=0.3", *QUESTIONS[:3]]})
    rows = list(check_entry(entry, drawn_rows(entry, 2, 1), UNMEASURED, settings, outputs=True))
    assert [row.why for row in rows] == ["", ""] and max(row.distance("kl") for row in rows) < 1e-3


def test_an_entry_of_older_numerics_is_stale_and_not_refused(league, tmp_path, capsys):
    _, _, entry, _ = league
    write_entry(tmp_path, entry | {"numerics": entry["numerics"] - 1})
    assert main(["check", "--league", str(tmp_path)]) == 0
    assert "stale, made under NUMERICS" in capsys.readouterr().out


def test_what_makes_no_entry_is_said(tmp_path, capsys):
    run_group(group(tmp_path, *SUMMARY, methods=("h2o",)), Session())
    made = {run.labels["method"]: run for run in runs(tmp_path)}
    with pytest.raises(ConfigError, match="run of the full cache"):
        entry_of(made["full"])
    (made["h2o"].path / DIVERGENCE).unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="has no divergence yet"):
        entry_of(made["h2o"])
    assert main(["submit", str(tmp_path / "nothing")]) == 2 and "is no run" in capsys.readouterr().err
    assert main(["page", "--league", str(tmp_path)]) == 2 and "has no entries" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": "other"}, "format and version"),
        ({"hash": 5}, "hash must be a text"),
        ({"kl": "small"}, "kl must be a number or null"),
        ({"words": "method=h2o"}, "words must be a list"),
        ({"rows": []}, "at least one row"),
        ({"rows": [{"example": "a"}]}, "index must be"),
        ({"rows": [{"example": "a", "index": 0, "first_by_prefill": True, "tokens": []}]}, "tokens must be"),
    ],
)
def test_a_file_that_is_no_entry_is_told(league, tmp_path, change, told):
    _, _, entry, _ = league
    file = tmp_path / "entry.json"
    file.write_text(json.dumps(entry | change))
    with pytest.raises(ConfigError, match=told):
        read_entry(file)


def test_the_page_shows_every_entry_and_nothing_in_it_is_markup(league, tmp_path, capsys):
    folder, _, entry, _ = league
    hostile = entry | {"setting": "<script>alert(1)</script>|x", "hash": "b" * 16}
    page = html_page([entry, hostile])
    assert page.count(entry["hash"]) >= 1 and "<script>" not in page and "&lt;script&gt;" in page
    assert "default-src 'none'" in page and re.search(r"\d+ KiB of \d+|\d+\.?\d* [KM]iB of", page)
    assert "<script>" not in markdown([hostile]) and "\\|x" in markdown([entry, hostile])
    (_, first, _, second, _) = markdown([entry, entry | {"task": "other"}]).split("**")
    assert first != second and "|\n\n**" in markdown([entry, entry | {"task": "other"}]), "a table per group"
    docs = tmp_path / "league.md"
    docs.write_text(f"# L\n{BEGIN}\nold\n{END}\nrest\n")
    out = tmp_path / "index.html"
    assert main(["page", "--league", str(folder), "--out", str(out), "--markdown", str(docs)]) == 0
    assert "old" not in docs.read_text() and docs.read_text().endswith("rest\n") and entry["hash"] in docs.read_text()
    docs.write_text("nothing")
    assert main(["page", "--league", str(folder), "--out", str(out), "--markdown", str(docs)]) == 2
    capsys.readouterr()


def test_the_tolerance_is_four_times_the_largest_difference(tmp_path):
    row = {"hash": "a", "example": "x", "kl": 1.0, "full_logprob": -1.0, "logprob": -2.0}
    one = {"environment": {"A": "1"}, "torch": "2", "instructions": "AVX2", "threads": 1, "rows": [row]}
    other = {**one, "environment": {"A": "2"}, "threads": 2, "rows": [row | {"kl": 1.003, "logprob": -2.0005}]}
    content = tolerance_file([one, other])
    assert [each["threads"] for each in content["measured"]] == [1, 2]
    assert content["tolerance"] == pytest.approx(
        {"kl": SAFETY * 0.003, "full_logprob": 1e-5, "logprob": SAFETY * 0.0005}
    )
    (tmp_path / "tolerance.json").write_text(json.dumps(content))
    assert (
        tolerance_of(tmp_path) == pytest.approx(content["tolerance"]) and tolerance_of(tmp_path / "none") == UNMEASURED
    )
    (tmp_path / "tolerance.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no tolerance"):
        tolerance_of(tmp_path)


def test_words_of_this_machine_are_left_out():
    words = ["method=h2o", "outputs_dir=/x", "limit=3", "log.project=y", "+task.question=after_eviction", "~shard"]
    assert words_of(words) == ["method=h2o", "+task.question=after_eviction"]
    choices = {"model": "testbed_rope", "task": "testbed_qa", "method": "h2o", "budget": "ratio"}
    assert words_of(["task=sample", "seed=2"], choices) == ["model=testbed_rope", "method=h2o", "task=sample", "seed=2"]
    assert words_of(["+method_file=x.py"], choices) == ["model=testbed_rope", "task=testbed_qa", "+method_file=x.py"]
