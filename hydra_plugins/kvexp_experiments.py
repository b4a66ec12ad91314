"""The options of `experiment` that are declared as data, conf/experiment/exhibits.json, as Hydra looks them up.

It stands here because Hydra imports the package hydra_plugins before it composes anything, by command line or by call.
A wheel has the file as it has the rest of conf/; `experiments.lib.exhibits` writes it.
"""

from __future__ import annotations

import json
from typing import Any

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import OmegaConf

from kvexp.util import CONF


class LazyOption(dict[str, Any]):
    """An option that is made a configuration when Hydra asks for a copy of it: to make all of them takes 0.3 s."""

    def __deepcopy__(self, memo: Any) -> Any:
        return OmegaConf.create(dict(self))


for path, option in json.loads((CONF / "experiment" / "exhibits.json").read_text(encoding="utf-8")).items():
    *folders, name = f"experiment/{path}.yaml".split("/")
    group = ConfigStore.instance().repo
    for folder in folders:
        group = group.setdefault(folder, {})
    group[name] = ConfigNode(name, LazyOption(option), "/".join(folders), "_global_", "kvexp")  # type: ignore[arg-type]
