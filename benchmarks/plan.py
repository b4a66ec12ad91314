"""The plan of a command as numbers, which `--dry-run` prints in words: for `benchmarks.dry_run_check`.

    python -m benchmarks.plan -m method=h2o kv_ratio=0.2 ...

The last line is JSON: seconds and bytes (null where they are not known) and what the time is based on.
"""

from __future__ import annotations

import json
import sys

from kvexp.run.main import compose_and_run, own_launchers
from kvexp.run.plan import plan, total_seconds
from kvexp.util import Session, active, keys_of


def main() -> int:
    session = Session()
    session.typed_keys = keys_of(sys.argv[1:])
    own_launchers()
    with active(session):
        groups = plan(compose_and_run, "--dry-run", session)
    peaks = [group.peak.total for group in groups if group.peak is not None]
    known = all(group.seconds is not None for group in groups)
    numbers = {
        "seconds": total_seconds(groups) if known else None,
        "bytes": max(peaks, default=None),
        "basis": sorted({group.basis for group in groups}),
    }
    print(json.dumps(numbers))
    return session.exit_code


if __name__ == "__main__":
    sys.exit(main())
