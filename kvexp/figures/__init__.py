"""Pictures of what was recorded. No torch."""

from .heatmap import grid, heatmap

__all__ = ["grid", "heatmap"]
