"""A spec as the objects of wandb's public API; nothing is sent before they are saved."""

from typing import Any

NAME = "kvexp"


def workspace(spec: dict[str, Any], entity: str, project: str) -> Any:
    """A saved view of the project: the run list with verdicts, one section per section of the spec."""
    import wandb_workspaces.workspaces as ws

    sections = [
        ws.Section(name=section["name"], panels=[panel(each) for each in section["panels"]], is_open=True)
        for section in spec["sections"]
    ]
    runs = ws.RunsetSettings(
        run_settings={key: ws.RunSettings(color=color) for key, color in spec["colors"].items()},
        pinned_columns=[f"summary:{name}" for name in spec["columns"]],
    )
    settings = ws.WorkspaceSettings(max_runs=100)
    return ws.Workspace(
        entity=entity, project=project, name=NAME, sections=sections, runset_settings=runs, settings=settings
    )


def report(spec: dict[str, Any], entity: str, project: str) -> Any:
    """A report: one heading and one grid of panels per section, all over the same runs."""
    import wandb_workspaces.reports.v2 as wr

    colors = {key: wr.RunSettings(color=color) for key, color in spec["colors"].items()}
    blocks: list[Any] = [wr.TableOfContents()]
    for section in spec["sections"]:
        runs = wr.Runset(entity=entity, project=project, name="runs", run_settings=colors)
        panels = [panel(each, place) for place, each in enumerate(section["panels"])]
        blocks += [wr.H1(section["name"]), wr.PanelGrid(runsets=[runs], panels=panels)]
    return wr.Report(entity=entity, project=project, title=NAME, blocks=blocks, width="fluid")


def panel(described: dict[str, str], place: int = 0) -> Any:
    """One panel; place: its number in a grid of two columns."""
    import wandb_workspaces.reports.v2 as wr

    layout = wr.Layout(x=12 * (place % 2), y=10 * (place // 2), w=12, h=10)
    if described["kind"] == "table":
        return wr.WeavePanelSummaryTable(table_name=described["key"], layout=wr.Layout(x=0, y=0, w=24, h=16))
    x, y = described["x"], described["y"]
    if described["kind"] == "points":
        x_metric, y_metric = wr.SummaryMetric(x), wr.SummaryMetric(y)
        return wr.ScatterPlot(title=f"{y} against {x}", x=x_metric, y=y_metric, range_y=(0, None), layout=layout)
    return wr.CustomChart(
        query={"summaryTable": {"tableKey": f"{described['key']}_table"}},
        chart_name="wandb/line/v0",
        chart_fields={"x": x, "y": y, "stroke": "line"},
        chart_strings={"title": described["key"]},
        layout=layout,
    )
