"""`python -m kvexp.reference_check FILE.npz ...`: exit code 0 if every compared field of every file passes."""

from __future__ import annotations

import argparse
import sys

from kvexp.errors import ConfigError
from kvexp.reference_check.run import run


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvexp.reference_check", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE.npz", help="recordings of the authors' code")
    failed = 0
    for path in parser.parse_args(arguments).files:
        print(path)
        try:
            report = run(path)
        except (ConfigError, OSError, KeyError, ValueError) as error:
            print(f"  cannot be compared: {error}")
            failed += 1
            continue
        print(report)
        failed += not report.passed
    print(f"{failed} file(s) failed" if failed else "all files pass")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
