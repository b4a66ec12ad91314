"""Whether the engine llama.cpp can be loaded here, for tests that need it."""

from __future__ import annotations

import pytest

from kvexp.generate.llama_cpp import library
from kvexp.util.errors import ConfigError

try:
    library()
    MISSING = ""
except ConfigError as error:
    MISSING = str(error)
needs_package = pytest.mark.skipif(bool(MISSING), reason=MISSING)
