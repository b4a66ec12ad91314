"""What --where takes on every command line that reads outputs."""

from collections.abc import Sequence
from typing import Any

from kvexp.errors import ConfigError


def where(pairs: Sequence[str]) -> dict[str, Any]:
    """["method=h2o,tova"] -> {"method": ["h2o", "tova"]}."""
    result: dict[str, Any] = {}
    for pair in pairs:
        name, equals, values = pair.partition("=")
        if not (name and equals):
            raise ConfigError(f"--where takes LABEL=VALUE, got {pair!r}; name the outputs folder before --where")
        result.setdefault(name, []).extend(values.split(","))
    return result
