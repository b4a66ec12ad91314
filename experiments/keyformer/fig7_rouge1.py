"""Keyformer, appendix A.5: Fig. 7 in ROUGE-1, from the runs of Fig. 7."""

from __future__ import annotations

import pandas as pd

from experiments.keyformer import fig7 as keyformer_fig7
from experiments.lib.data import points

CLAIM = (
    "What Fig. 7 shows in ROUGE-2 (keyformer at 70 % of the KV cache reaches 99 % of full attention; window and H2O at "
    "90 % do not) holds in ROUGE-1 (arXiv:2403.09054, section 4.1 and appendix A.5)"
)
SWEEPS = keyformer_fig7.SWEEPS


def table(frame: pd.DataFrame) -> pd.DataFrame:
    return points(frame, "rouge1", rival="h2o")


draw, holds = keyformer_fig7.draw, keyformer_fig7.holds
