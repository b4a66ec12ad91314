"""The dashboards' spec against what kvexp.log really logs, and the objects wandb's API makes of it; no network."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from report_runs import outputs
from test_log import command, read

from kvexp.dashboards import spec
from kvexp.dashboards.__main__ import check_reachable, main
from kvexp.dashboards.wandb_objects import report, workspace
from kvexp.errors import ConfigError
from kvexp.figures.style import color_of
from kvexp.results import table
from kvexp.results.divergence_print import divergence_frames

pytest.importorskip("wandb_workspaces", reason="comes with kvexp[eval]")

# wandb_workspaces itself is written against pydantic's older interface.
pytestmark = pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return outputs(tmp_path_factory.mktemp("dashboards") / "outputs")


@pytest.fixture(scope="module")
def logged(folder: Path) -> list[dict[str, Any]]:
    """What kvexp.log wrote to disk, run by run."""
    done = command(folder, folder.parent, "--offline")
    assert done.returncode == 0, done.stderr
    return [read(path) for path in (folder / "wandb").glob("offline-run-*") if path.is_dir()]


def whole(folder: Path) -> dict[str, Any]:
    return spec(table(folder), divergence_frames(folder, {})[0])


def panels(described: dict[str, Any], kind: str) -> list[dict[str, str]]:
    return [each for section in described["sections"] for each in section["panels"] if each["kind"] == kind]


def of_kind(value: Any, kind: str) -> list[Any]:
    """Every panel of a viewType, wherever it lies in a serialised view."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = [value] if isinstance(value, dict) and value.get("viewType") == kind else []
    return own + [found for each in inside for found in of_kind(each, kind)]


def test_every_panel_is_over_keys_that_are_logged(folder: Path, logged: list[dict[str, Any]]) -> None:
    described = whole(folder)
    runs = [found for found in logged if found["job_type"] != "sweep"]
    (sweep,) = (found for found in logged if found["job_type"] == "sweep")
    points, lines = panels(described, "points"), panels(described, "lines")
    assert {each["x"] for each in points} == {
        *("kv_ratio", "tpot_s", "ttft_s", "tokens_per_s"),
        *("kv_bytes", "peak_kv_bytes"),
    }
    for each in points:
        assert any({each["x"], each["y"]} <= set(found["summary"]) for found in runs), each
    for each in lines:
        assert f"{each['key']}_table/path" in sweep["summary"], each
        there = sweep["config"][f"_wandb/visualize/{each['key']}"]["panel_config"]
        assert there["panelDefId"] == "wandb/line/v0"
        assert there["fieldSettings"] == {"x": each["x"], "y": each["y"], "stroke": "line"}
    assert "runs/path" in sweep["summary"] and all("examples/path" in found["summary"] for found in runs)
    assert [each["key"] for each in panels(described, "table")] == ["runs", "examples"]
    for name in described["columns"]:
        assert any(name in found["summary"] for found in runs), name
    assert set(described["colors"]) == {found["run_id"] for found in runs}


def test_every_chart_that_is_logged_has_a_panel(folder: Path, logged: list[dict[str, Any]]) -> None:
    (sweep,) = (found for found in logged if found["job_type"] == "sweep")
    charts = {key.removeprefix("_wandb/visualize/") for key in sweep["config"] if key.startswith("_wandb/visualize/")}
    assert charts == {each["key"] for each in panels(whole(folder), "lines")} and len(charts) == 10


def test_an_axis_that_nothing_recorded_has_no_panel(folder: Path) -> None:
    described = spec(table(folder, {"task": "needle"}))
    assert "Quality against speed" not in {section["name"] for section in described["sections"]}
    assert {each["x"] for each in panels(described, "points")} == {"kv_ratio", "kv_bytes", "peak_kv_bytes"}


def test_the_workspace_serialises_and_comes_back(folder: Path) -> None:
    import wandb_workspaces.workspaces as ws

    described = spec(table(folder))
    made = workspace(described, "somebody", "trial")._to_model()
    text = json.loads(made.spec.model_dump_json(by_alias=True, exclude_none=True))
    check_panels(text, described)
    assert text["section"]["customRunColors"] == described["colors"]
    (tova,) = table(folder, {"method": "tova"})["hash"]
    assert described["colors"][tova] == color_of("tova")
    back = ws.Workspace._from_model(made)
    assert [section.name for section in back.sections] == [section["name"] for section in described["sections"]]
    assert [len(section.panels) for section in back.sections] == [len(each["panels"]) for each in described["sections"]]


def test_the_report_serialises(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb_workspaces.reports.v2.interface as interface

    # A run set asks the server for its project's number; nothing else of building a report needs one.
    monkeypatch.setattr(interface, "_get_api", lambda: None)
    monkeypatch.setattr(interface, "execute_graphql", lambda *_: {"project": {"internalId": "1"}})
    described = spec(table(folder))
    made = report(described, "somebody", "trial")._to_model()
    check_panels(json.loads(made.spec.model_dump_json(by_alias=True, exclude_none=True)), described)


def check_panels(text: dict[str, Any], described: dict[str, Any]) -> None:
    scatters = [each["config"] for each in of_kind(text, "Scatter Plot")]
    expected = [(f"summary:{each['x']}", f"summary:{each['y']}") for each in panels(described, "points")]
    assert [(each["xAxis"], each["yAxis"]) for each in scatters] == expected
    charts = [each["config"] for each in of_kind(text, "Vega2")]
    tables = [field["args"][0]["value"] for each in charts for field in fields(each) if field["name"] == "summaryTable"]
    assert tables == [f"{each['key']}_table" for each in panels(described, "lines")]
    assert len(of_kind(text, "Weave")) == 2


def fields(config: dict[str, Any]) -> list[dict[str, Any]]:
    return list(config["userQuery"]["queryFields"][0]["fields"])


def test_the_spec_is_printed_without_account(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    no_account(monkeypatch, tmp_path)
    assert main([str(folder), "--print"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(whole(folder)))


def no_account(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    (home / "netrc").touch()
    monkeypatch.setenv("NETRC", str(home / "netrc"))


def test_without_account_runs_or_network_it_is_one_clear_error(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    no_account(monkeypatch, tmp_path)

    def error(*options: str) -> str:
        assert main([str(option) for option in options]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1
        return said.err

    assert "no wandb account is configured: run `wandb login` or set WANDB_API_KEY" in error(str(folder))
    assert f"no run under {tmp_path}" in error(str(tmp_path))
    assert "log.project may have" in error(str(folder), "--project", "a/b")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # the discard port: nobody listens
    assert "no answer from http://127.0.0.1:9" in error(str(folder))


def test_any_answer_of_a_server_is_one() -> None:
    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(403)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        check_reachable(f"http://127.0.0.1:{server.server_port}")
        thread.join()
    with pytest.raises(ConfigError, match="no answer from nonsense"):
        check_reachable("nonsense")
