"""The report's page as text: what is in it, and that nothing from a run can be markup."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_runs import EVIL, EXAMPLES, WORSE, labels, outputs, run

import kvexp
from kvexp.results import plots as style
from kvexp.results import report as needle_section
from kvexp.results import report as samples
from kvexp.results import report as verdicts
from kvexp.results.report import BEFORE, SECTIONS, asset, digest, embed, index, look, main, page, plain, read
from kvexp.results.table import table, to_markdown
from kvexp.util.errors import ConfigError

pytest.importorskip("plotly", reason="comes with kvexp[eval]")


class Elements(HTMLParser):
    """Start tags with their attributes, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.inside = False
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return outputs(tmp_path_factory.mktemp("report") / "outputs")


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    return page(read(folder))


def test_embedded_data_is_no_markup_and_comes_back() -> None:
    value = {"<a>": [EVIL, WORSE, "&amp;", "\u2028 \ud800 é"], "n": [1, 0.5, None, True]}
    assert not set("<>&") & set(embed(value)) and embed(value).isascii()
    assert json.loads(embed(value)) == value


def test_what_json_cannot_hold_is_missing_or_text() -> None:
    assert plain({"a": float("nan"), "b": (float("inf"), Path("x"))}) == {"a": None, "b": [None, "x"]}


def test_only_the_pages_own_scripts_are_elements_and_each_is_named_in_the_policy(text: str) -> None:
    found = Elements(text)
    own = [asset(f"{name}.js") for name in (*BEFORE, *(section.name for section in SECTIONS), "start")]
    data, plotly, *rest = found.scripts
    assert rest == own and "plotly.js" in plotly[:200] and json.loads(data)["runs"]
    (policy,) = (attrs["content"] for tag, attrs in found.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy and all(digest(script) in policy for script in [plotly, *own])
    assert "default-src 'none'" in policy and "unsafe-eval" not in policy
    assert [tag for tag, _ in found.tags if tag in ("img", "iframe", "b")] == []


def test_nothing_is_loaded_from_elsewhere(text: str) -> None:
    addresses = [value for _, attrs in Elements(text).tags for name, value in attrs.items() if name in ("src", "href")]
    assert addresses and all(str(value).startswith(("#", "data:,")) for value in addresses)


def test_hostile_text_arrives_whole(folder: Path, text: str) -> None:
    found = json.loads(Elements(text).scripts[0])
    (evil,) = (each for each in found["runs"] if each["method"] == WORSE)
    assert (evil["model"], evil["task"]) == (EVIL, WORSE)
    assert found["sections"]["samples"]["texts"][evil["hash"]]["e1"]["output"] == f"the {WORSE} number 1"
    assert EVIL not in text and WORSE not in text


def test_the_same_runs_give_the_same_page(folder: Path, text: str) -> None:
    assert page(read(folder)) == text


def test_every_line_has_the_figures_colour_and_plotlys_words() -> None:
    for method in [*style._COLORS, "newcomer", EVIL]:
        for dashes in style.DASHES:
            found = look(method, dashes)
            assert found["color"] == style.color_of(method)
    assert look("h2o", "-") == {"color": "#e69f00", "symbol": "triangle-up", "dash": "solid"}
    assert look("full", style.DASHES[3])["dash"] == "8px,2px"


def test_the_index_holds_the_tables_numbers(folder: Path) -> None:
    frame = table(folder).set_index("hash")
    runs = {each["hash"]: each for each in index(read(folder))}
    refused = frame.index[frame["status"].eq("refused")]
    assert set(runs) == set(frame.index) - set(refused) and len(refused) == 1, "no filter shows what has no rows"
    for key, each in runs.items():
        expected = frame.loc[key]
        assert each["status"] == expected["status"] and each["verdict99"] == expected["verdict99"]
        if each["status"] == "done" and not each["full"]:
            ends = [expected[f"rouge1{end}"] for end in ("_of_full", "_low", "_high", "")]
            assert each["of"]["rouge1"] == ends
    assert {each["status"] for each in runs.values()} == {"done", "partial", "failed"}


def test_numbers_of_two_numerics_have_panels_of_their_own(folder: Path) -> None:
    panels = {(each["model"], each["panel"]) for each in index(read(folder)) if each["method"] == "h2o"}
    (old,) = (panel for model, panel in panels if model == "old")
    assert re.fullmatch(r"old / xsum, NUMERICS \d+", old)
    assert all(panel.endswith(f"NUMERICS {kvexp.NUMERICS}") for model, panel in panels if model != "old")


def test_verdict_cells_are_those_of_the_printed_table(folder: Path) -> None:
    frame = table(folder, {"model": ["tiny", "old"]})
    lines, found = to_markdown(frame), verdicts.verdicts_data(read(folder, {"model": ["tiny", "old"]}))
    printed = [sorted(line.strip("| ").split(" | ")) for line in lines.splitlines() if line.startswith("|")]
    heads = [[head.replace("\n", " ") for head in each["heads"]] for each in found["tables"]]
    assert heads[0][:5] == ["method", "kv_ratio", "KL", "95 %", "verdict on KL"], "divergences come first"
    quality = [each for each, head in zip(found["tables"], heads, strict=True) if "KL" not in head]
    for each in quality:
        assert [head.split("\n")[0] for head in each["heads"]][:4] == ["method", "kv_ratio", "99 %", "99.9 %"]
        for _, *cells in each["rows"]:
            assert sorted(cells) in printed, "the same cells, in an order of their own"
    assert sum(len(each["rows"]) for each in quality) == frame["status"].ne("refused").sum()
    about_kl, *others = found["notes"]
    assert about_kl.startswith("KL in nats per token") and all(f"- {note}" in lines for note in others)


def test_needle_cells_are_means_and_other_tasks_have_none(folder: Path) -> None:
    source = read(folder)
    found = needle_section.needle_data(source)
    assert found is not None
    methods = {row["method"]: row["hash"] for row in source.frame.to_dict("records") if row["task"] == "needle"}
    assert set(found) == set(methods.values())
    full = found[methods["full"]]
    assert full["lengths"] == ["128", "256"] and full["depths"] == ["0", "50", "100"]
    # Example i lies in cell i % 6 and scores 50 * (1 - 0.1 * (i % 3)): all of a cell alike, by depth alone.
    assert full["cells"]["rouge1"] == [[pytest.approx(value)] * 2 for value in (50, 45, 40)]
    assert needle_section.needle_data(read(folder, {"task": "xsum"})) is None
    assert 'id="needle"' not in page(read(folder, {"task": "xsum"}))


def test_half_of_the_samples_are_the_first_and_half_the_worst(folder: Path) -> None:
    source = read(folder, {"task": "xsum", "model": "tiny"}, samples=6)
    found = samples.samples_data(source)
    rows = source.frame.to_dict("records")
    (run,) = (row["hash"] for row in rows if (row["method"], row["kv_ratio"]) == ("h2o", 0.3))
    # Full scores 50, 45, 40, ... and the run half of that, and 0.9 of it from the middle on: 50 - 22.5 is the most.
    assert found["chosen"][run] == {"first": ["e0", "e1", "e2"], "lost": ["e12", "e15", "e18"]}
    (full,) = (row["baseline"] for row in rows if row["hash"] == run)
    assert found["texts"][full]["e12"]["reference"] == "the right number 12"
    assert found["texts"][run]["e12"]["reference"] is None, "the baseline's row carries it"
    assert found["texts"][run]["e1"]["output"] == "the wrong number 1"


def test_texts_that_are_too_many_are_fewer_and_too_long_are_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "SAMPLES_TOTAL", 900)
    monkeypatch.setattr(samples, "LONGEST", 7)
    found = samples.samples_data(read(folder, samples=20))
    assert found["per_run"] < found["asked"] == 20
    assert {row["output"] for rows in found["texts"].values() for row in rows.values()} == {
        "the wron",
        "the righ",
        "the <scr",
        "the </sc",
    }
    none = samples.samples_data(read(folder, samples=0))["texts"]
    assert none and not any(none.values())


def test_a_run_without_its_baseline_keeps_its_reference(tmp_path: Path) -> None:
    alone = run(tmp_path, labels("tiny", "xsum", "h2o", 0.5), 0.5, "0" * 16)
    found = samples.samples_data(read(tmp_path))
    assert found["texts"][alone.hash]["e0"]["reference"] == "the right number 0"
    assert len(found["chosen"][alone.hash]["first"]) == 20 < EXAMPLES


def test_the_command_writes_the_page(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "page.html"
    assert main([str(folder), str(file), "--where", "task=xsum"]) == 0
    assert file.stat().st_size > 4e6 and f"wrote {file}: 9 runs" in "".join(capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "no run under {folder}; run: kvexp run"),
        (["{folder}/nowhere"], "no folder {folder}/nowhere"),
        (["--samples", "-1"], "--samples must be 0 or more, got -1"),
        (["--where", "h2o"], "--where takes LABEL=VALUE"),
    ],
)
def test_what_cannot_be_shown_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    options = [option.format(folder=tmp_path) for option in options]
    folder = [] if options and options[0].startswith("/") else [str(tmp_path)]
    assert main([*folder, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said.format(folder=tmp_path) in error and error.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_a_choice_that_leaves_nothing_and_a_file_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has method=nobody; there are method="):
        read(folder, {"method": "nobody"})
    (tmp_path / "file").touch()
    assert main([str(folder), str(tmp_path / "file" / "page.html"), "--where", "model=old"]) == 2


def test_a_section_has_a_script_of_its_name() -> None:
    assert len({section.name for section in SECTIONS}) == len(SECTIONS)
    for section in SECTIONS:
        assert f'kvexp.section("{section.name}"' in asset(f"{section.name}.js")
