"""The tables of experiments.studies.two_models, of rows whose answer is known."""

import numpy as np
import pandas as pd
import pytest

from experiments.studies import two_models, wide
from experiments.studies.two_models import agreement, blocks_of, halves, moved, rows_of, text
from kvexp.results.read import AFTER_EVICTION
from kvexp.util.errors import ConfigError

METHODS = ("a", "b", "c", "d", "e")


def rows(second=METHODS, noise=0.02, n=24) -> pd.DataFrame:
    """Two blocks of n examples: the first model's order is METHODS, the second's is `second`."""
    dice = np.random.default_rng(3)
    return pd.DataFrame(
        {
            "numerics": 11,
            "model": model,
            "task": "news",
            "question": AFTER_EVICTION,
            "kv_ratio": ratio,
            "method": method,
            "example": f"news {number}",
            "kl": order.index(method) / 5 + dice.normal(0, noise),
        }
        for model, order in (("small", METHODS), ("large", second))
        for ratio in (0.25, 0.5)
        for method in METHODS
        for number in range(n)
    )


def test_agreement_is_spearmans_correlation():
    dice = np.random.default_rng(0)
    one, other = dice.normal(size=(2, 40, 9))
    expected = [pd.Series(a).corr(pd.Series(b), method="spearman") for a, b in zip(one, other, strict=True)]
    np.testing.assert_allclose(agreement(one, other), expected, atol=1e-12)


def test_equal_orders_agree_and_halves_say_what_chance_leaves():
    made = text(rows())
    assert made.count("| 1.00 (1.00..1.00) | 1.00 | 1.00, 1.00 | a ") == 2 and "**" not in made
    assert "Of 20 pairs in 2 blocks small decides 20, large 20, both 20, of which 20 alike" in made
    assert abs(np.mean([halves(np.random.default_rng(seed).normal(size=(24, 9))) for seed in range(12)])) < 0.2


def test_a_reversed_pair_and_a_method_that_moves_are_named():
    made = text(rows(("a", "e", "c", "d", "b")))
    assert "both 20, of which 10 alike" in made and "| b before e | news, hidden, 0.25; news, hidden, 0.5 |" in made
    assert "| b | 2.0 | 5.0 | **+3.0 (+3.0..+3.0)** |" in made and "| a | 1.0 | 1.0 | +0.0 (+0.0..+0.0) |" in made


def test_a_move_is_bold_by_an_interval_corrected_for_the_methods():
    """The first of two methods, or of eight, falls in 99 % of the resamples: enough for one of two, not of eight."""
    key = ("news", AFTER_EVICTION, 0.5)
    for count, sure in ((2, True), (8, False)):
        names, order = [f"m{i}" for i in range(count)], np.arange(count, dtype=float)
        moves = order.copy()
        moves[0] = 1.5
        draws = np.tile(moves, (2000, 1))
        draws[::100] = order
        found = moved(names, {key: [order[None], moves[None]]}, {key: [np.tile(order, (2000, 1)), draws]})
        assert found["sure"][0] == sure, found


def test_only_what_both_models_have_is_compared():
    all_of = rows()
    lacking = all_of[~(all_of["model"].eq("large") & all_of["method"].eq("c") & all_of["kv_ratio"].eq(0.5))]
    _, methods, blocks = blocks_of(lacking)
    assert methods == ["a", "b", "d", "e"] and len(blocks) == 2
    one_block = all_of[~(all_of["model"].eq("large") & all_of["kv_ratio"].eq(0.5))]
    assert [ratio for *_, ratio in blocks_of(one_block)[2]] == [0.25]


def test_what_cannot_be_compared_is_refused(tmp_path):
    made = rows()
    with pytest.raises(ConfigError, match="compares two models"):
        text(made[made["model"].eq("small")])
    with pytest.raises(ConfigError, match=r"NUMERICS \[11, 12\]"):
        text(made.assign(numerics=[11, *[12] * (len(made) - 1)]))
    with pytest.raises(ConfigError, match="experiment"):
        rows_of(str(tmp_path))
    assert two_models.main([]) == 2


def test_the_file_alone_makes_the_page(tmp_path, capsys):
    made = rows()
    wide(made, ["method"]).to_csv(file := tmp_path / "rows.csv", index=False)
    assert two_models.main(["--rows", str(file)]) == 0
    assert capsys.readouterr().out.strip() == text(made).strip()
