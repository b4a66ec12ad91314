"""Rows behind pages are drawn by a seed, computed anew and compared: on the testbed's model."""

from __future__ import annotations

import re
import shutil
from types import SimpleNamespace

import pandas as pd
import pytest

import kvexp
from experiments import recheck
from experiments.lib import recordings
from experiments.lib import sweep as sweeps
from experiments.lib.recordings import (
    CACHE,
    COLUMNS,
    DOCS,
    PROMPT,
    RECORDINGS,
    ROUNDING,
    SweepRecording,
    by_words,
    named,
    numbers_in,
    ruler_words,
)
from experiments.recheck import LEAST, SHARE, available, drawn, main, marks
from experiments.studies import decoding
from kvexp.util.errors import ConfigError

WORDS = "model=testbed_rope task=testbed_summary task.max_new_tokens=6 limit=4"
BY_NAME = {recording.name: recording for recording in RECORDINGS}


def made_up(prompts: int, methods: str = "abc", tasks: str = "xy") -> pd.DataFrame:
    place = {"numerics": 11, "model": "m", "question": "in_prompt", "how": "", "kl": 1.0}
    return pd.DataFrame(
        place | {"task": task, "example": f"{task}{number}", "method": method, "kv_ratio": ratio}
        for task in tasks
        for number in range(prompts)
        for method in methods
        for ratio in (0.2, 0.5)
    )


def test_a_sample_is_seeded_and_has_its_share_and_rows_of_each_method():
    rows = made_up(40)
    one, again, other = drawn(rows, 0), drawn(rows, 0), drawn(rows, 1)
    pd.testing.assert_frame_equal(one, again)
    assert set(one["example"]) != set(other["example"])
    assert len(one) == SHARE * len(rows) and set(one["task"]) == {"x", "y"}
    few = drawn(made_up(3), 0)
    assert (few["method"].value_counts() >= LEAST).all() and len(few) == 12, "two prompts of six rows"
    rare = rows[rows["method"].ne("c") | rows["example"].isin(["x7", "y9"])]
    assert (drawn(rare, 0)["method"] == "c").sum() == 4, "two prompts have two rows each: both are drawn"


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda recording: recording.name)
def test_every_recording_is_read_and_its_page_has_a_place(recording):
    rows = recording.rows()
    numbers = rows.drop(columns="kv_ratio") if recording.whole else rows
    assert list(rows)[: len(COLUMNS)] == COLUMNS and not numbers.isna().any(axis=None)
    assert not rows.duplicated([*PROMPT, *CACHE]).any()
    begin, end = marks(recording.name)
    said = recording.page.read_text("utf-8").partition(begin)[2].partition(end)[0]
    assert re.match(r"\s*Of NUMERICS \d+", said)
    page = (DOCS / "recheck.md").read_text("utf-8")
    assert re.search(rf"{recording.name}\b.*\| {len(rows):,} \|", page)
    sample = drawn(rows, 0, recording.whole)
    assert len(sample) < 0.1 * len(rows) and (not recording.whole or len(sample.groupby(PROMPT)) == 1)


@pytest.mark.parametrize("name", [name for name, one in BY_NAME.items() if hasattr(one, "sweeps") and not one.whole])
def test_commands_of_a_prompt_make_its_rows_and_few_others(name):
    recording = BY_NAME[name]
    rows = recording.rows()
    part = next(iter(drawn(rows, 0).groupby(PROMPT)))[1]
    names = set()
    for words in recording.sweeps(part):
        words = [re.sub(r"choice\((.*)\)", r"\1", word) for word in words]
        swept = dict(word.split("=", 1) for word in words)
        how = recording.how_of(" ".join(word for word in words if not word.startswith(("method=", "kv_ratio="))))
        names |= {
            (method, how, float(ratio))
            for method in swept["method"].split(",")
            for ratio in swept["kv_ratio"].split(",")
        }
    wanted = set(part[CACHE].itertuples(index=False, name=None))
    assert wanted <= names and len(names - wanted) <= 1, "vase has three budgets in some blocks of the league"


def test_the_settings_of_a_board_say_its_length():
    rows = BY_NAME["ruler_board"].rows()
    long = rows[rows["example"].str.contains("length 4096")].iloc[0]
    assert "task.lengths=[4096] limit=4" in ruler_words(long)
    assert "limit=8" in ruler_words(rows[rows["example"].str.contains("length 2048")].iloc[0])


def test_rows_without_data_or_model_are_left_out_and_said(monkeypatch):
    rows = BY_NAME["methods_league"].rows()
    monkeypatch.setattr(recheck, "cached_conversion", lambda digest: "here")
    some, reasons = available(rows, None)
    assert set(some["task"]) == {"news", "news_qa"} and len(reasons) == 2 and "give --data FOLDER" in reasons[0]
    monkeypatch.setattr(recheck, "cached_conversion", lambda digest: None)
    some, reasons = available(rows, None)
    assert some.empty and any("kvexp fetch smollm2_135m" in reason for reason in reasons)


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """A page with the rows of a small sweep behind it, made as its command makes them."""
    folder = tmp_path_factory.mktemp("recheck")
    words = WORDS.split()
    sweeps.sweep(
        "", [f"outputs_dir={folder / 'outputs'}", *words, "divergence=only", "method=h2o,window", "kv_ratio=0.3"]
    )
    page = folder / "page.md"
    page.write_text("\n".join(["# Page", *marks("small"), ""]))
    made = SweepRecording("small", page, folder / "rows.csv", pd.read_csv, words=lambda row: WORDS)
    rows = made.computed(folder / "outputs")
    assert len(rows) == 8 and (rows["kl"] > 0).all()
    rows.to_csv(made.file, index=False)
    return SweepRecording(
        "small", page, made.file, lambda file: pd.read_csv(file).fillna({"how": ""}), words=lambda row: WORDS
    )


@pytest.fixture(scope="module")
def computed(recording, tmp_path_factory):
    """Folder of the drawn rows, computed once more."""
    folder = tmp_path_factory.mktemp("computed")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recheck, "RECORDINGS", (recording,))
        assert main(["--outputs", str(folder)]) == 0
    return folder


def test_a_page_that_holds_says_so_and_nothing_is_computed_twice(recording, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(recheck, "RECORDINGS", (recording,))
    words = ["--outputs", str(tmp_path), "--page", "small"]
    assert main([*words, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "small: 6 of 8 rows, 3 prompts, 3 of them to compute, about" in said and not list(
        tmp_path.rglob("config.json")
    )
    real, calls = recordings.sweep, []

    def interrupted(*given):
        if calls:
            raise KeyboardInterrupt
        calls.append(real(*given))

    monkeypatch.setattr(recordings, "sweep", interrupted)
    assert main(words) == 130
    monkeypatch.setattr(recordings, "sweep", lambda *given: calls.append(real(*given)))
    assert main([*words, "--write"]) == 0 and len(calls) == 3, "the prompt computed before the interrupt is kept"
    assert re.search(r"\| page.md \| small \| 6 of 8 \| .* \| within \|", capsys.readouterr().out)
    line = rf"Of NUMERICS {kvexp.NUMERICS}; 6 of 8 rows at {kvexp.NUMERICS} within \S+ nats"
    assert re.search(line, recording.page.read_text())
    monkeypatch.setattr(recordings, "sweep", lambda *given: pytest.fail("computed again"))
    assert main(words) == 0 and "0 of them to compute" in capsys.readouterr().out


def test_a_wrong_row_is_found_and_its_page_says_so(recording, computed, monkeypatch, capsys):
    rows = recording.rows()
    at = drawn(rows, 0).index[0]
    planted = drawn(rows, 0).iloc[at]
    wrong = rows[list(CACHE)].eq(planted[CACHE]).all(axis=1) & rows["example"].eq(planted["example"])
    assert wrong.sum() == 1

    def moved(by):
        return rows.assign(kl=rows["kl"] + wrong * by)

    beyond = 2 * float(ROUNDING.of(rows[wrong]).iloc[0])
    for by, code in ((beyond, 1), (beyond / 8, 0)):
        monkeypatch.setattr(type(recording), "rows", lambda self, by=by: moved(by))
        monkeypatch.setattr(recheck, "RECORDINGS", (recording,))
        assert main(["--outputs", str(computed), "--write"]) == code
        said = capsys.readouterr().out
        assert ("1 OUTSIDE: record this page again" in said) == bool(code)
        assert (f"{planted['example']} {planted['method']}" in said) == bool(code)
        assert ("1 of them differ by more than" in recording.page.read_text()) == bool(code)


def test_of_means_one_is_computed_whole_and_its_rows_are_kept(recording, monkeypatch, capsys, tmp_path):
    one = recordings.RECORDINGS[[*BY_NAME].index("quantised_cache")]
    (words,) = one.sweeps(one.rows()[lambda rows: rows["how"].eq("cache.bits=4")])
    assert words == ["cache.bits=4", "method=full"] and set(one.rows()["method"]) > {"full_quantised", "h2o"}
    page, file = tmp_path / "page.md", tmp_path / "means.csv"
    page.write_text("\n".join(["# Page", *marks("means"), ""]))
    about = {"whole": True, "words": lambda row: f"{WORDS} kv_ratio=0.3", "how_of": named("method.recent_ratio")}
    about["sweeps"] = lambda rows: [[*rows["how"].iloc[0].split(), "method=h2o"]]
    means = SweepRecording("means", page, file, pd.read_csv, **about)
    row = {
        "model": "testbed_rope",
        "task": "testbed_summary",
        "question": "in_prompt",
        "method": "h2o",
        "kv_ratio": 0.3,
    }
    made = [row | {"how": f"method.recent_ratio={share}", "kl": -1.0} for share in (0.1, 0.2)]
    rows = pd.DataFrame(made).assign(numerics=11, example=lambda rows: rows["method"] + " " + rows["how"])
    rows.to_csv(file, index=False)
    monkeypatch.setattr(recheck, "RECORDINGS", (means,))
    monkeypatch.setattr(recheck, "BY_EXAMPLE", tmp_path / "kept")
    assert main(["--outputs", str(tmp_path / "outputs"), "--write"]) == 1
    assert "means: 1 of 2 rows, 1 prompts" in capsys.readouterr().out
    kept = pd.read_csv(tmp_path / "kept" / "means.csv")
    assert len(kept) == 4 and set(kept["method"]) == {"h2o"} and kept["kl"].gt(0).all()
    assert kept["setting"].str.contains("method.recent_ratio=0.").all()
    anew = means.computed(tmp_path / "outputs" / "means")
    assert len(anew) == 1 and anew["kl"].iloc[0] == pytest.approx(kept["kl"].mean(), rel=1e-4), (
        "answers of equal length"
    )
    rows.merge(anew[["how", "kl"]], on="how", how="left", suffixes=("_", "")).fillna(0).to_csv(file, index=False)
    assert main(["--outputs", str(tmp_path / "outputs"), "--write"]) == 0
    assert len(pd.read_csv(tmp_path / "kept" / "means.csv")) == 4, "in place of the same rows"


def test_numbers_of_an_exhibit_are_compared_as_they_are_printed(monkeypatch, tmp_path):
    said = {"numerics": 11, "model": "smollm2_135m", "name": "keyformer_fig7", "holds": None}
    rows = pd.DataFrame(numbers_in(said | {"words": "at 0.7 -0.041 (from 7), 12.5 %"}))
    assert rows["kl"].tolist() == [0.0, 0.7, -0.041, 7.0, 12.5]
    assert rows["printed"].tolist() == [0.0, 0.05, 0.0005, 0.0, 0.05]
    allowed = ROUNDING.of(rows)
    assert 0.0005 < allowed[2] < 0.00125 and allowed[0] < 0.5, "another verdict is outside"
    recording = BY_NAME["findings"]
    part = drawn(recording.rows(), 0, whole=True)
    (name,) = set(part["example"])
    second = part["model"].iloc[0] == recordings.SECOND
    entry = recordings.recorded(recordings.SECOND if second else "real")[name]
    words = [entry["words"], entry.get("divergence", {}).get("words")]
    judged = (entry["divergence"]["holds"], words[1]) if words[1] else None
    made = SimpleNamespace(holds=entry["holds"], words=words[0], divergence=judged)
    monkeypatch.setattr(recordings, "make_exhibit", lambda *given: made)
    recording.make(part, tmp_path, "hub")
    found = recheck.compared(recording, 1, part, tmp_path)
    assert found.outside.empty and found.far.max() == 0 and len(found.rows) > 3
    assert recording.seconds(part, tmp_path, None) == entry["seconds"]


def test_calibrations_are_those_that_the_rows_had(monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(recheck.league, "calibrate_for_league", lambda folder: made.append(folder))
    monkeypatch.setattr("kvexp.run.calibrate.calibrate_model", lambda words, *_, **__: made.append(words))
    monkeypatch.setattr("kvexp.run.calibrate.train_kvzap", lambda words, *_, **__: made.append(["kvzap", *words]))
    rows = made_up(1, tasks="x").assign(model="testbed_rope")
    for name, method, how, wanted in (
        ("methods_league", "h2o", "", []),
        ("methods_league", "h2o", "duo", [tmp_path]),
        ("methods_league", "qfilters", "", [tmp_path]),
        ("two_models", "qfilters", "", [["model=testbed_rope"]]),
        ("two_models", "kvzap", "", [["kvzap", "model=testbed_rope"]]),
        ("two_models", "h2o", "", []),
    ):
        made.clear()
        recheck.calibrate(BY_NAME[name], rows.assign(method=method, how=how), tmp_path)
        assert made == wanted, (name, method, how)


def test_environments_are_compared_with_the_first(recording, computed, monkeypatch, capsys, tmp_path):
    seen = []

    def run(words, env):
        seen.append(env.get("ATEN_CPU_CAPABILITY"))
        shutil.copytree(computed, words[words.index("--outputs") + 1])
        main(words[3:])

    monkeypatch.setattr(recheck, "RECORDINGS", (recording,))
    monkeypatch.setattr(recheck.subprocess, "run", run)
    assert main(["--outputs", str(tmp_path), "--where", "method=h2o", "--environments"]) == 0
    said = capsys.readouterr().out
    assert seen == [None, "avx2", "default"] and said.count("| 3 | 0 | 0 |") == 3
    monkeypatch.setattr(recheck.subprocess, "run", lambda *_, **__: None)
    assert main(["--outputs", str(tmp_path / "none"), "--where", "method=h2o", "--environments"]) == 1


def test_what_cannot_be_asked_for_is_refused(recording, monkeypatch, capsys, tmp_path):
    assert main(["--page", "nothing"]) == 2 and "no such recording: nothing" in capsys.readouterr().err
    assert main(["--write", "--where", "task=news"]) == 2 and "leave out --write or --where" in capsys.readouterr().err
    assert (
        main(["--page", "head_budgets", "--where", "size=3"]) == 2 and "NAME must be one of" in capsys.readouterr().err
    )
    monkeypatch.setattr(recheck, "RECORDINGS", (recording,))
    assert main(["--where", "method=nobody"]) == 2 and "no page has a row" in capsys.readouterr().err
    gone = recording.rows().assign(example="gone")
    monkeypatch.setattr(type(recording), "rows", lambda self: gone.drop_duplicates([*PROMPT, *CACHE]))
    assert main(["--outputs", str(tmp_path)]) == 2 and "no example gone any more" in capsys.readouterr().err


def test_a_text_of_the_decoding_study_is_asked_for_by_its_number(monkeypatch, tmp_path):
    recording, asked = BY_NAME["decoding"], []
    rows = recording.rows()
    part = next(part for _, part in rows.groupby(PROMPT) if part["question"].iloc[0] == "every 1 at 1/8")
    monkeypatch.setattr(decoding, "main", lambda words: asked.append(decoding.parser().parse_args(words)) or 0)
    recording.make(part, tmp_path, None)
    ((args,),) = (asked,)
    number = int(part["example"].iloc[0])
    assert (args.start, args.texts, args.every, args.shares) == (number, number + 1, 1, [8])
    assert set(args.rules) == set(part["method"]) and args.kept == ["prompt"] and args.kinds == [part["task"].iloc[0]]
    wanted = {(arm.rule, f"{arm.kept} {arm.slots}") for arm in decoding.arms(8, 100) if arm.rule in args.rules}
    assert set(part[["method", "how"]].itertuples(index=False, name=None)) <= wanted
    monkeypatch.setattr(decoding, "main", lambda words: 2)
    with pytest.raises(ConfigError, match="failed"):
        recording.make(part, tmp_path, None)


def test_settings_are_taken_from_the_words_of_a_run():
    assert named("budget.heads")("task.max_new_tokens=6 budget.heads=union") == "budget.heads=union"
    rows = made_up(1, tasks="x").assign(how=["a=1", "a=1", "", "", "", ""])
    assert by_words(rows) == [["method=b,c", "kv_ratio=0.2,0.5"], ["a=1", "method=a", "kv_ratio=0.2,0.5"]]
