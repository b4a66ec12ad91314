"""An exhibit in a notebook: what is missing is run, then its verdict and its figure stand below the cell."""

from __future__ import annotations

import warnings
from pathlib import Path

from IPython.display import Image, Markdown, display

from experiments.lib.pages import VERDICT
from experiments.lib.runner import Asked, make

# transformers' progress bars ask for ipywidgets where there is a notebook; what they would show goes to sweep.log.
warnings.filterwarnings("ignore", message="IProgress not found")


def show(name: str, scale: str = "testbed", outputs: str = "outputs", smoke: bool = False) -> None:
    """outputs: where runs are kept and looked for; a smoke run has the folder `smoke` in it for itself."""
    folder = Path(outputs) / "smoke" if smoke else Path(outputs)
    made = make(name, Asked(scale, folder.resolve(), smoke))
    display(Markdown(f"**{VERDICT[made.holds]}**: {made.words}"), Image(str(made.folder / "figure.png"), width=900))
