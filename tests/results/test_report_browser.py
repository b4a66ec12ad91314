"""The report in headless Chromium: it draws, its filters act, it asks the network for nothing, it runs no text."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_runs import EVIL, WORSE, labels, outputs, run

import kvexp
from kvexp.results.report import page, read

webdriver = pytest.importorskip("selenium.webdriver", reason="comes with kvexp[dev]")
Select = pytest.importorskip("selenium.webdriver.support.ui").Select
Service = pytest.importorskip("selenium.webdriver.chrome.service").Service
NoAlertPresentException = pytest.importorskip("selenium.common.exceptions").NoAlertPresentException
pytest.importorskip("plotly", reason="comes with kvexp[eval]")

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
# The panels: the runs of older NUMERICS have their own, after all others.
NEEDLE, XSUM, HOSTILE, OLD = (
    f"{name}, NUMERICS {kvexp.NUMERICS - older}"
    for name, older in (("tiny / needle", 0), ("tiny / xsum", 0), (f"{EVIL} / {WORSE}", 0), ("old / xsum", 1))
)
# The chart of tiny / xsum.
CHART = "[...document.querySelectorAll('#explorer .js-plotly-plot')].at(2)"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# The runs drawn in a section: the names of plotly's lines.
LINES = """return [...document.querySelectorAll('#' + arguments[0] + ' .js-plotly-plot')]
    .map(node => node.data.filter(trace => trace.name).map(trace => trace.name))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser with a profile of its own; skips where there is none."""
    found, driver = next(filter(None, map(shutil.which, BROWSERS)), None), shutil.which("chromedriver")
    if found is None or driver is None:
        pytest.skip(f"needs chromedriver and one of {', '.join(BROWSERS)} (.ci/browser installs them)")
    options = webdriver.ChromeOptions()
    options.binary_location = found
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(options=options, service=Service(driver))
    yield made
    made.quit()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    (folder / "page.html").write_text(page(read(outputs(folder / "outputs"))), encoding="utf-8")
    return folder / "page.html"


@pytest.fixture
def opened(browser: Any, file: Path) -> Iterator[Any]:
    """The page, fresh; whatever a test does there, it must leave no word in the console and no request behind."""
    resize(browser, 1400)
    browser.get_log("performance")
    browser.get(file.as_uri())
    yield browser
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"}
    assert file.as_uri() in asked
    assert {url for url in asked if not url.startswith(("data:", "blob:"))} == {file.as_uri()}
    with pytest.raises(NoAlertPresentException):
        _ = browser.switch_to.alert.text


def resize(browser: Any, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def choose(browser: Any, label: str, text: str) -> None:
    fields = browser.find_elements("css selector", "label.field")
    field = next(each for each in fields if each.text.startswith(label))  # the first: sections stand in their order
    Select(field.find_element("tag name", "select")).select_by_visible_text(text)


def drawn(browser: Any, section: str) -> list[list[str]]:
    return [sorted(name.strip() for name in names) for names in browser.execute_script(LINES, section)]


def headings(browser: Any, section: str) -> list[str]:
    found = browser.find_elements("css selector", f"#{section} .body h3")
    return [each.text for each in found if each.is_displayed()]


def text_of(browser: Any, selector: str) -> str:
    return str(browser.find_element("css selector", selector).get_property("textContent"))


def test_every_section_draws_and_every_chart_has_lines(opened: Any) -> None:
    sections = [each.get_attribute("id") for each in opened.find_elements("css selector", "main section")]
    assert sections == [
        "divergence",
        "verdicts",
        "explorer",
        "life",
        "cost",
        "samples",
        "kept",
        "needle",
        "about",
    ]
    assert [each for each in headings(opened, "life") if each.startswith("Turns")] == [
        "Turns",
        "Turns by distance of the fact",
    ]
    points = """return [...document.querySelectorAll('#life .js-plotly-plot')]
        .map(node => node.data.map(trace => trace.y.length))"""
    assert opened.execute_script(points) == [[2], [2], [1], [1]]  # quality and divergence, by turn and by distance
    assert headings(opened, "explorer") == [HOSTILE, NEEDLE, XSUM, OLD]
    evil, needle, xsum, old = drawn(opened, "explorer")
    assert len(old) == len(needle) == len(evil) == 1 and len(xsum) == 3  # h2o, keyformer, and tova's partial run
    marks = opened.execute_script(
        """return [...document.querySelectorAll('#explorer .js-plotly-plot')].map(node =>
        node.layout.shapes.map(shape => [shape.y0, shape.line.color, shape.line.dash || 'solid']))"""
    )
    assert marks == [[[100, "#000", "solid"], [99, "#c00000", "dash"]]] * 4
    assert len(opened.find_elements("css selector", "#explorer .js-plotly-plot .errorbar, #explorer .errorbars")) > 0


def test_intervals_and_values_are_the_tables(opened: Any, file: Path) -> None:
    trace = opened.execute_script(
        f"""return {CHART}.data
        .find(trace => trace.name.startsWith('h2o'))"""
    )
    frame = read(file.parent / "outputs").frame
    h2o = frame["model"].eq("tiny") & frame["task"].eq("xsum") & frame["method"].eq("h2o") & frame["status"].eq("done")
    frame = frame[h2o].sort_values("kv_ratio")
    assert trace["x"] == pytest.approx(list(frame["kv_ratio"]), abs=0.03) and list(frame["kv_ratio"]) == [0.3, 0.6]
    assert trace["y"] == list(frame["rouge1_of_full"])
    assert trace["line"]["color"] == "#e69f00"
    up, down = trace["error_y"]["array"], trace["error_y"]["arrayminus"]
    assert up == pytest.approx(list(frame["rouge1_high"] - frame["rouge1_of_full"]), abs=1e-12)
    assert down == pytest.approx(list(frame["rouge1_of_full"] - frame["rouge1_low"]), abs=1e-12)


def test_a_run_that_is_not_finished_is_hollow_and_one_without_numbers_is_named(opened: Any) -> None:
    colours = opened.execute_script(
        f"""return Object.fromEntries({CHART}.data
        .map(trace => [trace.name.split(' ')[0], trace.marker.color]))"""
    )
    assert colours["tova"] == ["#ffffff"] and "#ffffff" not in colours["h2o"]
    hover = f"""const node = {CHART};
        return node.data.find(trace => trace.name.startsWith('tova'))"""
    tova = opened.execute_script(hover)
    assert "% of full (too few examples)" in tova["text"][0] and tova["error_y"]["array"] == [0], "6 pairs"
    left = opened.execute_script(
        "return [...document.querySelectorAll('#explorer .panel')].at(2).querySelector('details').textContent"
    )
    assert "1 run not drawn" in left and "snapkv 0.3" in left and "out of memory" in left
    assert "Not finished: 1 partial, 1 failed. " in text_of(opened, "#notices")
    assert "NUMERICS" in text_of(opened, "#notices")
    cells = opened.find_elements("css selector", "#about td:first-child")
    assert {"partial", "failed", "refused"} <= {each.text for each in cells}


def test_model_task_method_and_metric_each_change_what_is_drawn(opened: Any) -> None:
    everything = drawn(opened, "explorer")
    choose(opened, "Model", "tiny")
    assert headings(opened, "explorer") == [NEEDLE, XSUM]
    kl, *others = headings(opened, "verdicts")
    assert kl.startswith("tiny / xsum: KL divergence from the full cache") and others == [NEEDLE, XSUM]
    choose(opened, "Task", "xsum")
    assert headings(opened, "explorer") == headings(opened, "cost") == [XSUM]
    assert drawn(opened, "needle") == []
    (before,) = drawn(opened, "explorer")
    opened.find_element("css selector", '#filters input[value="h2o"]').click()
    (after,) = drawn(opened, "explorer")
    assert set(before) - set(after) == {name for name in before if name.startswith("h2o")} != set()
    shown = [each.text.split()[0] for each in opened.find_elements("css selector", "#verdicts tbody tr") if each.text]
    assert shown and "h2o" not in shown and "full" in shown
    first = "return document.querySelector('#explorer .js-plotly-plot').data[0].y"
    of_rouge1 = opened.execute_script(first)
    choose(opened, "Metric", "rouge2")
    assert opened.execute_script(first) != of_rouge1
    assert "rouge2, % of full" in text_of(opened, "#explorer .js-plotly-plot .ytitle")
    buttons = {each.text: each for each in opened.find_elements("css selector", "#filters button")}
    buttons["none"].click()
    assert drawn(opened, "explorer") == []
    buttons["all"].click()
    choose(opened, "Model", "all models")
    choose(opened, "Task", "all tasks")
    assert drawn(opened, "explorer") == everything


def test_speed_memory_and_the_pareto_front(opened: Any) -> None:
    choose(opened, "Model", "tiny")
    pairs = opened.find_elements("css selector", "#cost .pair")
    assert "No times were recorded" in pairs[0].text and "hydra/launcher=basic" in pairs[0].text  # needle: not timed
    assert len(pairs[0].find_elements("css selector", ".js-plotly-plot")) == 1
    assert len(pairs[1].find_elements("css selector", ".js-plotly-plot")) == 2
    before = text_of(opened, "#cost .pair:nth-child(2) .xtitle")
    choose(opened, "Time", "ms to the first token")
    assert (before, text_of(opened, "#cost .pair:nth-child(2) .xtitle")) == ("ms per token", "ms to the first token")
    points = [{"x": x, "y": y} for x, y in ((3, 9), (1, 5), (2, 5), (2, 7), (4, 8), (1, 4), (3, 9))]
    front = opened.execute_script("return kvexp.pareto(arguments[0])", points)
    assert [(point["x"], point["y"]) for point in front] == [(1, 5), (2, 7), (3, 9)]
    drawn_front = opened.execute_script(
        """return [...document.querySelectorAll('#cost .pair')][1].querySelectorAll('.js-plotly-plot')[1]
        .data.find(trace => trace.name === 'Pareto front').y"""
    )
    assert drawn_front == sorted(drawn_front) and drawn_front[-1] == 100
    assert len(drawn_front) == 5, "h2o and keyformer twice, full; tova is cheapest of all, but not finished"


def test_a_table_sorts_by_the_column_chosen(opened: Any) -> None:
    choose(opened, "Model", "tiny")
    choose(opened, "Task", "xsum")

    def column(head: str) -> list[str]:
        (_, table) = (each for each in opened.find_elements("css selector", "#verdicts table") if each.is_displayed())
        heads = table.find_elements("css selector", "th")
        (place,) = (i for i, each in enumerate(heads) if each.text.split(" \u25b2")[0].split(" \u25bc")[0] == head)
        heads[place].find_element("css selector", "button").click()
        rows = table.find_elements("css selector", "tbody tr")
        return [row.find_elements("css selector", "td")[place].text for row in rows]

    up, down = column("R-1"), column("R-1")
    numbers = [float(cell) for cell in up if cell != "-"]
    assert numbers == sorted(numbers) and up[: len(numbers)] == [f"{number:.2f}" for number in numbers]
    assert [cell for cell in down if cell != "-"] == [cell for cell in reversed(up) if cell != "-"]
    assert up[-1] == down[-1] == "-" and up.count("-") == 1, "what is missing comes last both ways"


def test_a_sample_stands_beside_the_baselines_with_its_differences_marked(opened: Any) -> None:
    choose(opened, "Model", "tiny")
    choose(opened, "Example", "e1")
    full, ours, reference = opened.find_elements("css selector", "#samples .side")
    assert full.find_element("css selector", ".text").text == "the right number 1"
    assert ours.find_element("css selector", ".text").text.startswith("the ")
    assert reference.find_element("css selector", ".text").text == "the right number 1"
    assert f'; ended at "{WORSE}"' in ours.find_element("css selector", ".small").text
    assert re.search(r"kvexp diagnose prompt \S*/[0-9a-f]{16} 'e1'", text_of(opened, "#samples .body"))
    run = opened.find_element("css selector", "#samples select")
    Select(run).select_by_visible_text(next(o.text for o in Select(run).options if "xsum: keyformer 0.3" in o.text))
    words = [
        [each.text for each in opened.find_elements("css selector", f"#samples .text {tag}")] for tag in ("del", "ins")
    ]
    assert words == [["right"], ["wrong"]]
    choose(opened, "Example", "e0")
    assert "Identical, word for word." in text_of(opened, "#samples .body")
    assert "ended by max_new_tokens" in text_of(opened, "#samples .body")
    opened.find_element("xpath", "//section[@id='samples']//button[text()='next']").click()
    assert opened.find_element("css selector", "#samples .text ins").text == "wrong"


def test_a_diff_is_a_longest_common_subsequence(opened: Any) -> None:
    def diff(a: str, b: str) -> list[list[str]]:
        sides = opened.execute_script("return kvexp.diff(arguments[0], arguments[1])", a, b)
        return [[word for same, word in side if not same] for side in sides]

    assert diff("a b c d", "b x d") == [["a", "c"], ["x"]]
    assert diff("a  b", "a\nb") == [[], []], "white space is no difference"
    assert diff("", "new words") == [[], ["new", "words"]]
    assert diff("我 你好", "我他好") == [["你"], ["他"]]


def test_heat_maps_show_the_cells(opened: Any) -> None:
    assert headings(opened, "needle") == ["full cache", next(iter(headings(opened, "needle")[1:]))]
    first = opened.execute_script("return document.querySelector('#needle .js-plotly-plot').data[0]")
    assert first["x"] == ["128", "256"] and first["y"] == ["0", "50", "100"]
    assert [row[0] for row in first["z"]] == pytest.approx([50, 45, 40])


def test_no_chart_is_taller_than_its_place(opened: Any) -> None:
    heights = opened.execute_script(
        "return [...document.querySelectorAll('.js-plotly-plot')].map(n => [n.clientHeight, n._fullLayout.height])"
    )
    assert len({outer for outer, _ in heights}) > 1 and all(abs(outer - inner) < 1 for outer, inner in heights)


def test_hostile_text_is_shown_as_text(opened: Any) -> None:
    choose(opened, "Model", EVIL)
    assert headings(opened, "explorer") == [HOSTILE]
    hover = """const node = document.querySelector('#explorer .js-plotly-plot');
        Plotly.Fx.hover(node, [{curveNumber: 0, pointNumber: 0}]);
        return node.querySelector('.hovertext').textContent"""
    assert WORSE in opened.execute_script(hover) and "x=" + EVIL in opened.execute_script(hover)
    choose(opened, "Example", "e1")
    texts = [each.text for each in opened.find_elements("css selector", "#samples .text")]
    assert texts[:2] == [f"the {EVIL} number 1", f"the {WORSE} number 1"]
    assert WORSE in text_of(opened, "#filters") and WORSE in text_of(opened, "#verdicts")
    assert EVIL in text_of(opened, "#about") and WORSE in text_of(opened, "#about")
    assert opened.find_elements("css selector", "img, main script, #samples b") == []


def test_even_markup_put_into_the_page_could_not_run(browser: Any, file: Path) -> None:
    """The policy, should escaping ever fail: a handler and a script that no digest names do nothing."""
    browser.get(file.as_uri())
    browser.execute_script("document.querySelector('main').innerHTML = '<img src=x onerror=\"window.ran = 1\">'")
    ran = browser.execute_async_script("setTimeout(() => arguments[0](window.ran === undefined), 300)")
    assert ran
    assert any("Content Security Policy" in entry["message"] for entry in browser.get_log("browser"))


def test_a_crowded_page_begins_with_one_model_and_says_what_it_leaves_out(browser: Any, tmp_path: Path) -> None:
    for model, tasks in (("a", 14), ("b", 1)):
        for task in range(tasks):
            full = run(tmp_path / "outputs", labels(model, f"task{task:02}", "full"), 1.0, None, rows=2)
            run(tmp_path / "outputs", labels(model, f"task{task:02}", "h2o", 0.5), 0.5, full.hash, rows=2)
    (tmp_path / "page.html").write_text(page(read(tmp_path / "outputs")), encoding="utf-8")
    browser.get((tmp_path / "page.html").as_uri())
    assert headings(browser, "explorer") == [f"a / task{task:02}" for task in range(12)]
    assert "12 of 14 panels are drawn" in text_of(browser, "#explorer .notice")
    choose(browser, "Model", "b")
    assert headings(browser, "explorer") == ["b / task00"]
    assert browser.find_elements("css selector", "#explorer .notice") == []


def test_a_task_with_the_full_cache_alone_has_no_chart(browser: Any, tmp_path: Path) -> None:
    for task in ("first", "second", "third"):
        full = run(tmp_path / "outputs", labels("a", task, "full"), 1.0, None, rows=2)
    run(tmp_path / "outputs", labels("a", "third", "h2o", 0.5), 0.5, full.hash, rows=2)
    (tmp_path / "page.html").write_text(page(read(tmp_path / "outputs")), encoding="utf-8")
    browser.get((tmp_path / "page.html").as_uri())
    for section in ("explorer", "cost"):
        assert headings(browser, section) == ["a / third"]
        assert "Not drawn: 2 panels with nothing to compare" in text_of(browser, f"#{section}")


@pytest.mark.parametrize("width", [1400, 700, 390])
def test_nothing_is_wider_than_the_window(opened: Any, width: int) -> None:
    resize(opened, width)
    opened.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 300))")
    page_width, clipped = opened.execute_script(
        """const wide = document.documentElement.clientWidth;
        const out = [...document.querySelectorAll('.chart, .legend, .side, select, .chip, h2, h3, p')].filter(each => {
            const box = each.getBoundingClientRect();
            return box.width && (box.left < -1 || box.right > wide + 1);
        });
        return [document.documentElement.scrollWidth - wide, out.map(each => each.outerHTML.slice(0, 80))]"""
    )
    assert page_width <= 0 and clipped == []
    charts = opened.execute_script(
        "return [...document.querySelectorAll('.js-plotly-plot')].map(n => [n.clientWidth, n._fullLayout.width])"
    )
    assert charts and all(abs(outer - inner) < 1 for outer, inner in charts)


SEEN = """const frame = arguments[0].querySelector('.scroll').getBoundingClientRect();
    return [...arguments[0].querySelectorAll('th')].map(each => [each.textContent, each.getBoundingClientRect().right])
        .filter(([, right]) => right <= frame.right + 1).map(([text]) => text)"""


def test_a_narrow_window_shows_the_verdicts_first_and_says_that_there_is_more(opened: Any) -> None:
    resize(opened, 500)
    opened.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 300))")
    tables = opened.find_elements("css selector", "#verdicts .scroller")
    assert len(tables) == 5
    for place, table in enumerate(tables):
        seen = [head.split("\n")[0] for head in opened.execute_script(SEEN, table)]
        decides = ["99 %", "99.9 %"] if place else ["KL", "95 %", "verdict"]
        assert seen[:2] == ["method", "kv_ratio"] and seen[2 : 2 + len(decides)] == decides
        assert table.find_element("css selector", ".hint").is_displayed() and "more" in table.get_attribute("class")
    opened.execute_script("arguments[0].querySelector('.scroll').scrollLeft = 10000", tables[0])
    opened.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 100))")
    assert "more" not in tables[0].get_attribute("class").split(), "the last column is in sight"


def test_a_wide_window_cuts_no_column_and_gives_its_width_to_the_charts(opened: Any) -> None:
    wide = opened.execute_script("return document.querySelector('main').clientWidth")
    for table in opened.find_elements("css selector", ".scroller"):
        hidden = opened.execute_script(
            "const frame = arguments[0].querySelector('.scroll'); return frame.scrollWidth - frame.clientWidth", table
        )
        assert hidden <= 0 and not table.find_element("css selector", ".hint").is_displayed(), table.text
    choose(opened, "Model", "tiny")
    choose(opened, "Task", "needle")  # one chart each, for want of times
    for section in ("explorer", "cost"):
        (width,) = opened.execute_script(
            f"return [...document.querySelectorAll('#{section} .chart')].map(n => n.clientWidth)"
        )
        assert width > 0.98 * wide, section


@pytest.mark.parametrize("width", [1400, 500])
def test_points_of_one_budget_stand_side_by_side_and_none_is_cut(browser: Any, tmp_path: Path, width: int) -> None:
    """Five methods at equal budgets, equally good: at the ends of both axes, too."""
    methods = ("a2sf", "h2o", "keyformer", "tova", "window")
    full = run(tmp_path / "outputs", labels("tiny", "xsum", "full"), 1.0, None)
    for ratio, score in ((0.02, 0.0), (0.1, 0.5), (1.0, 1.1)):
        for method in methods:
            run(tmp_path / "outputs", labels("tiny", "xsum", method, ratio), score, full.hash)
    (tmp_path / "page.html").write_text(page(read(tmp_path / "outputs")), encoding="utf-8")
    resize(browser, width)
    browser.get((tmp_path / "page.html").as_uri())
    for section in ("explorer", "cost"):
        found = browser.execute_script(
            """const chart = document.querySelector('#' + arguments[0] + ' .js-plotly-plot');
            const box = (node) => { const b = node.getBoundingClientRect(); return [b.left, b.right, b.top, b.bottom] };
            const clipped = (each) => each.closest('[clip-path]') !== null;
            const points = [...chart.querySelectorAll('.trace.scatter')].filter(p => p.querySelector('.errorbar'));
            return [box(chart), points.map(each => [...each.querySelectorAll('.errorbar .yerror')].map(box)),
                points.flatMap(each => [...each.querySelectorAll('.point')].map(p => [...box(p), clipped(p)]))]""",
            section,
        )
        (left, right, top, bottom), bars, points = found
        assert len(bars) == len(methods) and len(points) == 15, section
        for place in range(3):
            ends = sorted((line[place][0], line[place][1]) for line in bars)
            assert all(second[0] >= first[1] - 0.5 for first, second in itertools.pairwise(ends)), (section, ends)
        for x0, x1, y0, y1, clipped in points:
            assert left <= x0 and x1 <= right and top <= y0 and y1 <= bottom and not clipped


def test_kept_tokens_say_which_heads_hold_them(opened: Any) -> None:
    """By hand: of three heads token 0 has lost one and token 1 two at the end of the prompt, the rest nothing."""

    def tokens() -> list[list[str]]:
        spans = opened.find_elements("css selector", "#kept .text span")
        return [[each.get_attribute("class"), each.get_attribute("title")] for each in spans]

    assert text_of(opened, "#kept .text") == f"some {EVIL} text {WORSE} end"
    first, second, third, *unread = tokens()
    assert first == ["some", "position 0: held by 2 of 3 heads\nlayer 0: 1 of 2\nlayer 1: 1 of 1"]
    assert second == ["some", "position 1: held by 1 of 3 heads\nlayer 0: 0 of 2\nlayer 1: 1 of 1"]
    assert third[0] == "all" and [kind for kind, _ in unread] == ["later question", "later answer"]
    choose(opened, "When", "after 1 new tokens")
    assert tokens()[0] == ["some", "position 0: held by 1 of 3 heads\nlayer 0: 1 of 2\nlayer 1: 0 of 1"]
    assert [kind for kind, _ in tokens()][3:] == ["all question", "later answer"]
    choose(opened, "Task", "needle")
    assert "None of the runs shown was diagnosed." in text_of(opened, "#kept")
