"""Data for a page, so that no text in it, whatever a model wrote, is ever markup or script."""

import base64
import hashlib
import json
import math
from typing import Any

import pandas as pd

from kvexp.terminal import visible


def plain(value: Any) -> Any:
    """The value as JSON can hold it: numpy's scalars as Python's, NaN, NA and infinities as None, texts visible."""
    if isinstance(value, dict):
        return {visible(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is pd.NA:
        return None
    value = getattr(value, "item", lambda: value)()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float) else visible(str(value))


def embed(value: Any) -> str:
    """JSON for a <script type="application/json">, in ASCII: without `<`, nothing in it can end the element."""
    text = json.dumps(plain(value), allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def digest(script: str) -> str:
    """A script's name in a Content-Security-Policy (w3.org/TR/CSP3, hash-source)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
