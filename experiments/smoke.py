"""A sweep made small: what `--smoke` changes of it."""

from __future__ import annotations

from omegaconf import OmegaConf

from experiments.exhibits import ROOT

EXAMPLES = 2


def smaller(experiment: str) -> list[str]:
    """Overrides for the first of its models, the first and the last of its budgets, and two examples."""
    path = ROOT / "conf" / "experiment" / f"{experiment}.yaml"
    params = OmegaConf.load(path).hydra.sweeper.params
    found = [f"limit={EXAMPLES}"]
    if "model" in params:
        found.append(f"model={str(params.model).split(',')[0]}")
    if "kv_ratio" in params:
        ratios = str(params.kv_ratio).split(",")
        found.append(f"kv_ratio={','.join(dict.fromkeys([ratios[0], ratios[-1]]))}")
    return found
