"""rich's console for text from models, data and file names: its own colours reach the terminal, theirs do not."""

from __future__ import annotations

from collections.abc import Iterable

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from kvexp.terminal import visible


class Console(rich.console.Console):
    """rich.console.Console; control characters of whatever is printed are shown (`kvexp.terminal.visible`)."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Cells of a table come through here before the table sets their widths, so columns stay straight."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))
