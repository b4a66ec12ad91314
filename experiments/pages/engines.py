"""docs/engines.md: KL by bytes of the formats and evictions that engines ship."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from omegaconf import OmegaConf

from experiments.pages import COLORS, ROOT, blank, markdown
from kvexp.core.quantized import SlotBytes
from kvexp.run.build import quantization_of

FORMATS = (  # (engine, name on the page, settings of kvexp's twin)
    ("llama.cpp", "q8_0", "cache.codec=q8_0 cache.rotate=null"),
    ("llama.cpp", "q4_0", "cache.codec=q4_0 cache.rotate=null"),
    ("vLLM", "fp8, GPU", "cache.codec=fp8"),
    ("vLLM", "fp8, CPU", "cache.codec=fp8_truncated"),
    ("vLLM", "TurboQuant, 8 and 4 bits", "cache.codec=turboquant cache.key_bits=8 cache.value_bits=4"),
    ("vLLM", "TurboQuant, 4 bits", "cache.bits=4 cache.codec=turboquant cache.signs=False"),
    ("NVIDIA", "nvfp4", "cache.codec=nvfp4"),
)
DEFAULT, EIGHT = "NORM_SUM, window 8 (default)", "full cache, u8 (default)"
RIGHT = ("q8_0", "q4_0", "nvfp4", "evict to 512 tokens")  # named to the right of their dots
HEAD = 64  # channels of a head of SmolLM2-135M


def rows() -> pd.DataFrame:
    """Columns engine, setting, share (of the full cache's bytes), kl, low and high."""
    codecs = pd.read_csv(ROOT / "docs" / "quantised_cache.csv").query("sweep == 'codecs'").set_index("setting")
    lines = []
    for engine, name, setting in FORMATS:
        how = OmegaConf.to_container(OmegaConf.from_dotlist(setting.split()))["cache"]
        share = SlotBytes(HEAD, HEAD, quantization_of(how)).of(1000) / SlotBytes(HEAD, HEAD).of(1000)
        kl = codecs.loc[f"{setting} task.max_new_tokens=16", ["kl", "kl_low", "kl_high"]]
        lines.append((engine, name, share, *kl))
    table = pd.read_csv(ROOT / "docs" / "engines.csv", comment="#").query("task == 'news'")
    table["share"] = table["megabytes"] / table["megabytes"].iloc[0]  # of the full cache, which is the first
    for _, row in table[table["setting"].isin([EIGHT, DEFAULT])].sort_values("share", ascending=False).iterrows():
        name = "u8 (default)" if row["setting"] == EIGHT else f"evict to {row['tokens']:.0f} tokens"
        share = row["share"] * (2 if row["setting"] == EIGHT else 1)  # float32 numbers, of which u8 keeps 8 of 16 bits
        lines.append(("OpenVINO", name, share, *row[["kl", "low", "high"]]))
    return pd.DataFrame(lines, columns=["engine", "setting", "share", "kl", "low", "high"])


def draw() -> Figure:
    figure, (axes,) = blank()
    for (engine, part), color in zip(rows().dropna().groupby("engine", sort=False), COLORS, strict=False):
        axes.plot(part["share"], part["kl"], "o", color=color, markersize=6)
        axes.vlines(part["share"], part["low"], part["high"], color=color)
        for _, row in part.iterrows():
            side, gap = ("left", 0.008) if row["setting"] in RIGHT else ("right", -0.008)
            label = (
                f"{engine}: {row['setting']}" if row.name == part.index[0] else row["setting"].removeprefix("evict to ")
            )
            axes.text(row["share"] + gap, row["kl"], label, color=color, ha=side, va="center")
    axes.set(yscale="log", xlim=(0.1, 0.85), xlabel="share of the full cache's bytes at 16 bits")
    axes.set_ylabel("KL from the full cache, nats per token")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:g}"))
    return figure


def table() -> str:
    lines = [
        (engine, setting, f"{share:.2f}", "no twin" if kl != kl else f"{kl:#.2g} ({low:#.2g}..{high:#.2g})")
        for engine, setting, share, kl, low, high in rows().itertuples(index=False)
    ]
    return markdown(("engine", "cache", "share of bytes", "KL (95 %)"), lines)
