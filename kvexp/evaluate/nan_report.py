"""A model that puts out NaN or inf is run once more on the same batch, to say which of its layers did."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from kvexp.errors import NotFinite
from kvexp.evaluate.batches import Batch

Made = TypeVar("Made")


def layer_named(model: Any, batch: Batch, make: Callable[[], Made]) -> Made:
    """make(), whose NotFinite also says the layer and the examples."""
    try:
        return make()
    except NotFinite as error:
        names = ", ".join(example.id for _, example in batch)
        raise NotFinite(f"{error} ({_where(model, make)}; examples {names}){_advice(model)}") from error


def _where(model: Any, make: Callable[[], Any]) -> str:
    from kvexp.models.nan_locator import first_not_finite

    with first_not_finite(model) as found:
        try:
            make()
        except NotFinite:
            pass
        else:
            return "but not when the same batch was run again: is this machine's memory sound?"
    if not found:
        return "in no module's output, so in an attention score or in the cache"
    number = re.search(r"\.(\d+)(?:\.|$)", found[0])
    return f"first in layer {number[1]}, module {found[0]}" if number else f"first in module {found[0]}"


def _advice(model: Any) -> str:
    name = str(model.dtype).removeprefix("torch.")
    return "; float16 ends at 65504: try model.dtype=bfloat16 or float32" if name == "float16" else ""
