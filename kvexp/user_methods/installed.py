"""Methods that installed packages offer: entry points of the group kvexp.methods."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from kvexp.errors import ConfigError
from kvexp.paths import CONF

GROUP = "kvexp.methods"


def installed_methods() -> dict[str, EntryPoint]:
    """Name -> entry point; nothing is imported. ConfigError for a name that is kvexp's own or another package's."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        if (CONF / "method" / f"{point.name}.yaml").is_file():
            raise ConfigError(
                f"{package_of(point)} offers a method called {point.name}, which is one of kvexp's own; its entry "
                "point needs another name"
            )
        if point.name in found and found[point.name].value != point.value:
            raise ConfigError(
                f"{package_of(point)} and {package_of(found[point.name])} both offer a method called {point.name}; "
                "uninstall one of them"
            )
        found[point.name] = point
    return found


def package_of(point: EntryPoint) -> str:
    """ "kvexp-keydiff 0.1", the distribution that an entry point belongs to."""
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value
