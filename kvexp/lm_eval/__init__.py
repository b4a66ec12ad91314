"""lm-eval's verbs on kvexp's generate: log-likelihoods and texts under eviction, and kvexp as a model of lm-eval.

`kvexp lm-eval` is lm-eval's command line with the model kvexp; `python run.py task=lm_eval` writes the same
numbers as rows. Importing this package imports no lm-eval.
"""

from __future__ import annotations

from kvexp.lm_eval.evaluator import Bench, Encoder, Judged, check_row_mask

__all__ = ["Bench", "Encoder", "Judged", "check_row_mask"]
