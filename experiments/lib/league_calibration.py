"""What methods of the league learn from the model beforehand, on texts that no task of the league reads."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.lib.real_scale import MODEL
from kvexp.tasks.articles import training_articles
from kvexp.util import ConfigError, replace

TEXTS = "calibration_texts.jsonl"  # in the league's outputs
DIGESTS = "calibrations.json"


def calibrate_for_league(outputs: Path) -> None:
    """Make the calibrations that are missing or that are not the league's: of queries, heads, and KVzap's scores.

    They are made on the articles that are kept for training, and take the place of the model's older ones in the cache
    folder. ConfigError where one cannot be made.
    """
    from kvexp.hf.calibrate import SURROGATES
    from kvexp.run.calibrate import calibrate_model, train_kvzap
    from kvexp.run.calibrated import model_digest
    from kvexp.run.jobs import composed_model

    words = [f"model={MODEL}"]
    digest = model_digest(composed_model(words)[1])
    outputs.mkdir(parents=True, exist_ok=True)
    kept = outputs / DIGESTS
    if not kept.exists() or json.loads(kept.read_text("utf-8")) != _digests(digest):
        texts = outputs / TEXTS
        lines = [json.dumps({"text": f"{one.title}\n\n{one.text}"}) for one in training_articles()]
        replace(texts, ("\n".join(lines) + "\n").encode())
        calibrate_model(words, str(texts), tokens=2048, count=20)
        replace(kept, json.dumps(_digests(digest)).encode())
    wanted = [one.id for one in training_articles()]
    if list(SURROGATES.about(digest).get("articles", ())) != wanted:
        train_kvzap(words, "", tokens=1250, count=400)


def _digests(model: str) -> dict[str, str | None]:
    """Digests of what the cache folder holds of a model's queries and heads; None for what is not there."""
    from kvexp.hf.calibrate import HEADS, QUERIES

    found: dict[str, str | None] = {}
    for name, file in (("queries", QUERIES), ("heads", HEADS)):
        try:
            made = file.read(model)
        except ConfigError:  # written by another version: made anew
            made = None
        found[name] = None if made is None else made.digest
    return found
