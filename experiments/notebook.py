"""An exhibit in a notebook: what is missing is run, then its verdicts and its figure stand below the cell."""

from __future__ import annotations

import warnings
from pathlib import Path

from IPython.display import Image, Markdown, display

from experiments.lib.exhibits import REAL, load
from experiments.lib.real_scale import scale_of
from experiments.lib.record import VERDICT, is_speed
from experiments.lib.runner import OUTPUTS, Setup, make

# transformers' progress bars ask for ipywidgets where there is a notebook; what they would show goes to sweep.log.
warnings.filterwarnings("ignore", message="IProgress not found")


def show(
    name: str, scale: str | None = None, outputs: str = str(OUTPUTS), smoke: bool = False, data: str | None = None
) -> None:
    """outputs: where runs are kept and looked for; a smoke run has the folder `smoke` in it for itself.

    scale, data: as of `python -m experiments.reproduce`. An exhibit without a real scale says so and shows nothing.
    """
    scale, exhibit = scale_of(scale, data), load(name)
    if scale == REAL and (exhibit.testbed_only or is_speed(name)):
        why = exhibit.testbed_only or "it is about speed on a GPU"
        display(Markdown(f"**no real scale**: {why}"))
        return
    folder = Path(outputs) / "smoke" if smoke else Path(outputs)
    result = make(name, Setup(scale, folder.resolve(), smoke, data=data))
    remark = " (SMOKE: a few examples, the verdict means nothing)" if smoke else ""
    display(Markdown(f"**{VERDICT[result.holds]}**: {result.words}{remark}"))
    if result.divergence is not None:
        display(Markdown(f"By divergence **{VERDICT[result.divergence[0]]}**: {result.divergence[1]}"))
    display(Image(str(result.folder / "figure.png"), width=900))
    if result.divergence is not None:
        display(Image(str(result.folder / "divergence.png"), width=600))
