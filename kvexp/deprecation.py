"""Names of the public API that were renamed: the old ones work for one release, with a DeprecationWarning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any


def deprecated_names(module: str, old: Mapping[str, tuple[str, Any]]) -> Callable[[str], Any]:
    """A module's `__getattr__` that answers for old names.

    module: the module's dotted name. old: old name -> (new name, what it names). Any other name is an AttributeError,
    as without this function.
    """

    def __getattr__(name: str) -> Any:
        if name not in old:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new, what = old[name]
        warnings.warn(f"{module}.{name} is called {module}.{new} now", DeprecationWarning, stacklevel=2)
        return what

    return __getattr__
