"""Errors, fields, files, output, strict JSON: what every layer may use.

Named here is what a method of somebody else's imports (docs/new_method.md).
"""

from kvexp.util.errors import ConfigError
from kvexp.util.fields import AtLeast, Odd, Range

__all__ = ["AtLeast", "ConfigError", "Odd", "Range"]
