"""The tables of experiments.studies.ruler_board, of rows whose answer is known."""

import pandas as pd
import pytest

from experiments.studies import ruler_board
from experiments.studies.ruler_board import HIDDEN, METHODS, RATIOS, SEEN, added, read_wide, text, wide
from kvexp.util.errors import ConfigError
from kvexp.util.files import CONF


def rows(kl, count=12) -> pd.DataFrame:
    """Twelve examples, or `count`, of two tasks; kl: (method, question, share, number) -> KL."""
    return pd.DataFrame(
        {
            "numerics": 11,
            "task": task,
            "question": question,
            "method": method,
            "kv_ratio": ratio,
            "example": f"{task} length {1024 * (1 + number % 2)} row {number // 2}",
        }
        | {"kl": kl(method, question, ratio, number)}
        for task in ("vt", "cwe")
        for question in (SEEN, HIDDEN)
        for method in METHODS
        for ratio in RATIOS
        for number in range(count)
    )


def test_each_length_has_its_own_means(tmp_path):
    short = rows(lambda method, question, ratio, number: (question == HIDDEN) * (1 + number % 2 + number / 100), 40)
    long = short[short["method"].isin(ruler_board.AT_LONG) & short["example"].str.contains("1024 row [0-9]$")]
    long = long.assign(example=long["example"].str.replace("1024", "4096"), kl=long["kl"] * 3)
    wide(pd.concat([short, long])).to_csv(file := tmp_path / "rows.csv", index=False)
    made = text(read_wide(file))
    lines = [line.split(" | ") for line in made.splitlines()]
    assert "KL, below 4,096 tokens, 2 tasks, 40 examples of each:" in made
    assert "KL, 4,096 tokens, 2 tasks, 10 examples of each:" in made
    assert [sum(line[0] == f"| {method}" for line in lines) for method in ("tova", "h2o")] == [4, 3]
    replaced = added(read_wide(file), long.assign(kl=5.0))
    assert replaced["kl"].eq(5).sum() == len(long) and len(replaced) == len(short) + len(long)


def test_the_sweep_is_the_one_that_is_declared():
    declared = (CONF / "experiment" / "ruler_board.yaml").read_text("utf-8")
    assert f"method: {','.join(METHODS)}\n" in declared
    assert f"kv_ratio: {','.join(f'{ratio:g}' for ratio in sorted(RATIOS))}\n" in declared


def test_a_folder_without_the_sweep_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="experiment"):
        ruler_board.rows_of(str(tmp_path))


def test_rows_of_a_file_are_joined_by_those_of_further_tasks(tmp_path):
    made = rows(lambda method, question, ratio, number: number + ratio)
    old, new = made[made["task"] == "vt"], made.assign(kl=made["kl"] + 1)
    wide(old).to_csv(file := tmp_path / "rows.csv", index=False)
    both = added(read_wide(file), new[new["task"] == "cwe"])
    order = list(made.columns[:-1])
    expected = made.assign(kl=made["kl"] + (made["task"] == "cwe"))
    pd.testing.assert_frame_equal(
        both.sort_values(order, ignore_index=True)[made.columns], expected.sort_values(order, ignore_index=True)
    )
    assert added(both, new)["kl"].sum() == new["kl"].sum()
    with pytest.raises(ConfigError, match=r"NUMERICS \[11, 12\]"):
        added(old, new[new["task"] == "cwe"].assign(numerics=12))


def test_the_file_alone_is_shown(tmp_path, capsys):
    wide(rows(lambda method, question, ratio, number: ratio)).to_csv(file := tmp_path / "rows.csv", index=False)
    assert ruler_board.main(["--rows", str(file)]) == 0
    assert "KL, below 4,096 tokens, 2 tasks, 12 examples of each" in capsys.readouterr().out
    assert ruler_board.main([]) == 2
