"""Points of one x side by side, so that no error bar hides another, and none is cut at an axis."""

from collections.abc import Iterable

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

STEP = 3.5  # points (1/72 inch) from one line to the next
MOST = 14.0  # of all lines of one place together


def dodge(artists: Iterable[Artist], place: int, count: int) -> None:
    """Draw these, of the line `place` of `count`, a few points aside; the data stay what they are.

    Once they stand in their axes: matplotlib finds no limits by artists that were moved before.
    """
    away = (place - (count - 1) / 2) * min(STEP, MOST / count)
    for artist in artists:
        figure = artist.get_figure(root=True)
        assert isinstance(figure, Figure)
        artist.set_transform(artist.get_transform() + ScaledTranslation(away / 72, 0, figure.dpi_scale_trans))
        artist.set_clip_on(False)
        artist.set_in_layout(False)  # else what is not clipped takes room from the panels
