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


class OldName:
    """A class attribute under its old name: reading or calling it warns and answers as the new name does.

    new: the new name. what: the attribute as one class defines it, so that `super().old` in a subclass finds that
    class's own; without it, whatever the object has under the new name.
    """

    def __init__(self, new: str, what: Any = None) -> None:
        self.new, self.what, self.old = new, what, "?"

    def __set_name__(self, owner: type, name: str) -> None:
        self.old = name

    def __get__(self, instance: Any, owner: type) -> Any:
        warnings.warn(f"{owner.__name__}.{self.old} is called {self.new} now", DeprecationWarning, stacklevel=2)
        if self.what is None:
            return getattr(owner if instance is None else instance, self.new)
        return self.what.__get__(instance, owner) if hasattr(self.what, "__get__") else self.what


def keep_old_hooks(cls: type, renamed: Mapping[str, str]) -> None:
    """Let a class that overrides a hook under its old name override the new one, with a DeprecationWarning.

    To be called from `__init_subclass__` of the class that declares the hooks, and once for that class itself.
    renamed: old name -> new name. Hooks that the class defines under their new names answer to the old ones too.
    """
    for old, new in renamed.items():
        own = vars(cls)
        if old in own and new not in own:
            warnings.warn(f"{cls.__qualname__}.{old}: this hook is called {new} now", DeprecationWarning, stacklevel=3)
            setattr(cls, new, own[old])
        elif new in own and old not in own:
            alias = OldName(new, own[new])
            alias.old = old
            setattr(cls, old, alias)
