"""Recorded runs as tables, verdicts, figures and pages."""

import os

# Products of resampled counts are small: shared among threads that wait for each other they take several times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when numpy is imported first
