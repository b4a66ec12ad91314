"""benchmarks/README.md: times on two cores over Hugging Face's full cache, by the prompt's length."""

from __future__ import annotations

from matplotlib.figure import Figure

from experiments.pages import ROOT, Curve, blank, curves, gpu

PAGE = ROOT / "benchmarks" / "README.md"
PANELS = {"a token": ("decode", "tpot_s", (1024, 4096, 6144)), "first token": ("prefill", "ttft_s", (1024, 4096, 7168))}
CPU = {"device": "cpu", "shape": "smollm2_135m"}
ROWS: gpu.Rows = {
    f"{title}, {prompt // 1024}k": (benchmark, {**CPU, "prompt": prompt}, field, "")
    for title, (benchmark, field, prompts) in PANELS.items()
    for prompt in prompts
}
ROWS["memory, 7k"] = ("prefill", {**CPU, "prompt": 7168}, "peak_bytes", "")


def draw() -> Figure:
    figure, panels = blank(2)
    found = dict(gpu.ratios(ROWS))
    for axes, (title, (_, _, prompts)) in zip(panels, PANELS.items(), strict=True):
        lines = []
        for column, name in enumerate(gpu.NAMES.values()):
            points = [found[f"{title}, {prompt // 1024}k"][column] for prompt in prompts]
            value, low, high = zip(*((r.value, r.low, r.high) for r in points if r), strict=True)
            lines.append(Curve(name, prompts, value, low, high))
        axes.axhline(1, color="black", linewidth=1)
        axes.set_ylim(0.4, 1.25)
        curves(axes, lines, "tokens of the prompt", "share of Hugging Face's time", log="")
        axes.set_title(title, fontsize=10.5)
    return figure


def table() -> str:
    return gpu.table(ROWS)
