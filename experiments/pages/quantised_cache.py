"""docs/quantised_cache.md: KL by bytes, of fewer tokens, fewer bits and both."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from experiments.pages import COLORS, ROOT, Curve, blank, curves, markdown

METHODS = ("keyformer", "kvzip", "h2o", "expected_attention")
BITS = (16, 8, 4, 2)
NAMES = (
    ("16 bits, tokens evicted", 0.51, 0.15),
    ("8 bits", 0.65, 4e-5),
    ("4 bits", 0.34, 0.0055),
    ("2 bits", 0.2, 1.3),
)
RATIOS = (0.5, 0.25, 0.125)


def recorded() -> pd.DataFrame:
    """The runs of `experiment=bits_or_tokens` with `bits` and `ratio`, the share of bytes asked for or NaN."""
    rows = pd.read_csv(ROOT / "docs" / "quantised_cache.csv").query("sweep == 'bits' and method != 'pqcache'")
    numbers = [rows["setting"].str.extract(rf"{key}=([\d.]+)")[0] for key in ("cache.bits", "bytes_ratio")]
    return rows.assign(bits=numbers[0].astype(int), ratio=numbers[1].astype(float))


def draw() -> Figure:
    figure, (axes,) = blank()
    rows, lines = recorded(), []
    for bits in BITS:
        evicted = rows.query("method == 'keyformer' and slots < 900")  # with more slots every token fits
        whole = rows[rows["method"].eq("full_quantised")]
        part = pd.concat([evicted, whole]).query(f"bits == {bits}").sort_values("bytes_share")
        lines.append(Curve("", *(part[name].tolist() for name in ("bytes_share", "kl", "kl_low", "kl_high"))))
    curves(axes, lines, "share of the full cache's bytes", "KL from the full cache, nats per token", log="xy")
    axes.xaxis.set_major_locator(FixedLocator([0.125, 0.25, 0.5]))
    axes.set_xlim(0.115, 0.8)
    for line, color, (name, x, y) in zip(lines, COLORS, NAMES, strict=False):
        axes.text(x, y, name, color=color, va="center")
        if name != NAMES[0][0]:
            axes.plot(line.x[-1], line.y[-1], "o", color=color, markersize=11, fillstyle="none")
    axes.text(0.3, 2e-4, "ring: every token kept", ha="center")
    return figure


def table() -> str:
    kl = recorded().set_index(["ratio", "method", "bits"])["kl"]
    cells = [(ratio, method, [kl[ratio, method, bits] for bits in BITS]) for ratio in RATIOS for method in METHODS]
    lines = [
        (f"{ratio:g}", f"`{method}`", *(f"**{x:.3g}**" if x == min(values) else f"{x:.3g}" for x in values))
        for ratio, method, values in cells
    ]
    return markdown(("share of bytes", "method", *(f"{bits} bits" for bits in BITS)), lines)
