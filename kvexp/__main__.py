"""`python -m kvexp` is the command `kvexp`."""

from __future__ import annotations

from kvexp.cli import main

if __name__ == "__main__":
    main()
