"""What `make size` counts, and what it refuses."""

from __future__ import annotations

from size import CEILINGS, Size, above, ceilings_of, size_of, sizes

SOURCE = '''"""Three words here."""

import os  # a comment behind code


# Two words
class Public:
    """One."""

    x = 1


def _hidden():
    return """no docstring"""
'''


def test_code_is_counted_without_docstrings_comments_and_blanks():
    assert size_of(SOURCE) == Size(lines=5, files=1, words=7, names=1)


def test_a_room_above_its_ceiling_or_without_one_is_named():
    found = {"tests": Size(lines=12), "docs": Size(lines=3)}
    assert above(found, {"tests": 12, "docs": 3}) == []
    assert above(found, {"tests": 10, "docs": 3}) == ["tests: 12 code lines, 2 above its ceiling"]
    assert above(found, {"tests": 12, "attic": 3}) == [
        "docs: no ceiling in size.toml",
        "attic: a ceiling in size.toml, and no such room",
    ]


def test_every_room_is_seen_and_has_a_ceiling():
    found = sizes()
    assert set(ceilings_of(CEILINGS.read_text("utf-8"))) == set(found)
    assert {"kvexp", "kvexp/core", "tests", "experiments", "all of kvexp"} <= set(found)
    rooms = [size.lines for room, size in found.items() if room.startswith("kvexp")]
    assert found["all of kvexp"].lines == sum(rooms)
