"""docs/engines.md: KL by bytes of the formats and evictions that engines ship."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from omegaconf import OmegaConf

from experiments.lib.tables import with_interval
from experiments.pages import COLORS, ROOT, blank, markdown
from kvexp.core.quantized import SlotBytes
from kvexp.run.build import quantization_of

LLAMA = (  # (name on the page, settings of engine=llama_cpp, bits of a number: each block of 32 has 16 for its scale)
    ("q8_0", "engine.cache_k=q8_0", 8.5),
    ("q8_0 keys, q4_0 values", "engine.cache_k=q8_0 engine.cache_v=q4_0", 6.5),
    ("q4_0", "engine.cache_k=q4_0", 4.5),
    ("f16, sliding at a half", "cache.positions=original engine.cache_k=f16", 8),
)
TWINS = (  # (engine, name on the page, settings of kvexp's twin)
    ("vLLM", "fp8, GPU", "cache.codec=fp8"),
    ("vLLM", "fp8, CPU", "cache.codec=fp8_truncated"),
    ("vLLM", "TurboQuant, 8 and 4 bits", "cache.codec=turboquant cache.key_bits=8 cache.value_bits=4"),
    ("vLLM", "TurboQuant, 4 bits", "cache.bits=4 cache.codec=turboquant cache.signs=False"),
    ("NVIDIA", "nvfp4", "cache.codec=nvfp4"),
)
BEST = "keyformer", "bytes_ratio=0.5 cache.bits=16"  # the best of four evictions
DEFAULT, SIZES = "NORM_SUM, window 8 (default)", (512, 256)
RIGHT = (7, 0, "left")  # where a name stands, from its dot in points
PLACES = {
    "f16, sliding at a half": (-7, 0, "right"),
    "evict to 256 tokens": (-7, 0, "right"),
    "TurboQuant, 8 and 4 bits": (-7, 4, "right"),
    "TurboQuant, 4 bits": (-7, -8, "right"),
    "q4_0": (-7, 5, "right"),
    "q8_0 keys, q4_0 values": (-5, -15, "center"),
}
HEAD = 64  # channels of a head of SmolLM2-135M


def rows() -> pd.DataFrame:
    """Columns engine, setting, share (of the full cache's bytes), kl, low and high."""
    llama = pd.read_csv(ROOT / "docs" / "llama_cpp.csv").query("task == 'news'").set_index("setting")
    lines = []
    for name, setting, bits in LLAMA:
        kl = llama.loc[f"{setting} engine=llama_cpp task.max_new_tokens=16", ["kl", "kl_low", "kl_high"]]
        lines.append(("llama.cpp", name, bits / 16, *kl))
    recorded = pd.read_csv(ROOT / "docs" / "quantised_cache.csv")
    codecs = recorded.query("sweep == 'codecs'").set_index("setting")
    for engine, name, setting in TWINS:
        how = OmegaConf.to_container(OmegaConf.from_dotlist(setting.split()))["cache"]
        share = SlotBytes(HEAD, HEAD, quantization_of(how)).of(1000) / SlotBytes(HEAD, HEAD).of(1000)
        kl = codecs.loc[f"{setting} task.max_new_tokens=16", ["kl", "kl_low", "kl_high"]]
        lines.append((f"{engine} (twin)", name, share, *kl))
    table = pd.read_csv(ROOT / "docs" / "engines.csv", comment="#").query("task == 'news'")
    full = table["megabytes"].iloc[0]
    for size in SIZES:
        (row,) = table.query("setting == @DEFAULT and tokens == @size").to_dict("records")
        kl = row["kl"], row["low"], row["high"]
        lines.append(("OpenVINO (twin)", f"evict to {size} tokens", row["megabytes"] / full, *kl))
    (best,) = recorded.query("method == @BEST[0] and setting == @BEST[1]").to_dict("records")
    lines.append(("kvexp", "Keyformer at a half", best["bytes_share"], best["kl"], best["kl_low"], best["kl_high"]))
    return pd.DataFrame(lines, columns=["engine", "setting", "share", "kl", "low", "high"])


def draw() -> Figure:
    figure, (axes,) = blank()
    for (engine, part), color in zip(rows().groupby("engine", sort=False), COLORS, strict=False):
        axes.plot(part["share"], part["kl"], "o", color=color, markersize=6)
        axes.vlines(part["share"], part["low"], part["high"], color=color)
        for _, row in part.iterrows():
            label = row["setting"].removeprefix("evict to ")
            if row.name == part.index[0]:
                label = f"{engine}: {row['setting']}"
            *offset, side = PLACES.get(row["setting"], RIGHT)
            how = {"textcoords": "offset points", "color": color, "ha": side, "va": "center"}
            axes.annotate(label, (row["share"], row["kl"]), offset, **how)
    axes.set(yscale="log", xlim=(0.06, 0.9), xlabel="share of the full cache's bytes at 16 bits")
    axes.set_ylabel("KL from the full cache, nats per token")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:g}"))
    return figure


def table() -> str:
    lines = [
        (engine, setting, f"{share:.2f}", with_interval(kl, low, high))
        for engine, setting, share, kl, low, high in rows().itertuples(index=False)
    ]
    return markdown(("engine", "cache", "share of bytes", "KL (95 %)"), lines)
