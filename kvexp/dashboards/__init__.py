"""The report's panels in Weights & Biases, as a saved view of a project and as a report there.

kvexp dashboards outputs/ (after: kvexp log outputs/ --online). Which panels, over which keys that
were logged, is plain data (`spec`), printed by --print; wandb's public API (wandb_workspaces) makes them. Needle
heat-maps are not among them: what kvexp.log publishes has no such table.
"""

from kvexp.dashboards.spec import spec

__all__ = ["spec"]
