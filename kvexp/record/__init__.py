"""Runs on disk: identity, folder, one row per example; a kill at any moment loses at most the example in flight.

    outputs/<hash>/config.json      what was run: hash, numerics, config, labels, baseline   (written first, atomically)
                   env.json         where it was first run
                   examples.jsonl   one row per line, appended
                   quarantine.jsonl lines of it that were no rows: file, line, why, text
                   command.json     the latest configuration, choices and overrides it was asked for with
                   asked.json       the labels it was asked for under, once there are several; the latest come last
                   done.json        how many rows a finished run has
                   failure.json     why the last attempt failed
                   diagnose/        what kvexp.diagnose has added, if asked for: see kvexp.evictions.eviction_files
                   .lock .claim     held while a file is changed, while the run is worked on; empty, and never removed
                   .claim.i-of-n    held while that part of its examples is worked on
    outputs/.refused/<key>.json     a job that failed before it had a folder: overrides, labels, error, message, time

Needs a POSIX system and a file system with `flock`.
"""

from kvexp.record.files import check_writable
from kvexp.record.refused_jobs import Refusal, accept, refusals, refuse
from kvexp.record.run_folder import Run, identity, runs

__all__ = ["Refusal", "Run", "accept", "check_writable", "identity", "refusals", "refuse", "runs"]
