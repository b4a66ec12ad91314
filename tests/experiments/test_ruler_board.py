"""The tables of experiments.studies.ruler_board, of rows whose answer is known."""

import numpy as np
import pandas as pd
import pytest

from experiments.studies import ruler_board
from experiments.studies.ruler_board import HIDDEN, METHODS, RATIOS, SEEN, Side, added, read_wide, text, verdict, wide
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


def test_a_conclusion_holds_by_an_interval_off_zero():
    dice = np.random.default_rng(0)
    made = rows(lambda method, question, ratio, number: (method == "h2o") + dice.normal(0, 0.1))
    tova, h2o = Side("tova", SEEN), Side("h2o", SEEN)
    assert verdict(made, tova, h2o)[0] == "holds"
    assert verdict(made, h2o, tova)[0] == "contradicted"
    assert verdict(made, tova, Side("snapkv", SEEN))[0] == "open"
    assert verdict(made, tova, h2o)[1].startswith("+1.0") or verdict(made, tova, h2o)[1].startswith("+0.9")


def test_budgets_of_an_example_count_once():
    """The interval of three equal budgets is that of one."""
    made = rows(lambda method, question, ratio, number: number * (method == "h2o"))
    one, three = (Side("h2o", SEEN, ratios) for ratios in (RATIOS[:1], RATIOS))
    assert len(three.means(made)) == 24
    assert verdict(made, Side("tova", SEEN), one) == verdict(made, Side("tova", SEEN), three)


def test_the_tables_have_every_method_and_task():
    made = text(rows(lambda method, question, ratio, number: ratio + (question == HIDDEN) + 0.5 * (method != "tova")))
    assert made.startswith("2 tasks, 12 examples of each")
    lines = made.splitlines()
    assert sum(line.startswith("| tova | 0.50 ") for line in lines) == 1 and "tova 0.25" in made
    assert all(any(line.startswith(f"| {method} |") for line in lines) for method in METHODS)
    assert all(claim in made for claim, *_ in ruler_board.CONCLUSIONS)


def test_lengths_stand_side_by_side_where_half_of_the_methods_ran_at_4k(tmp_path):
    """Each length's own difference; the tables of all methods are of the short lengths alone."""
    short = rows(lambda method, question, ratio, number: (question == HIDDEN) * (1 + number % 2 + number / 100), 40)
    long = short[short["method"].isin(ruler_board.AT_LONG) & short["example"].str.contains("1024 row [0-9]$")]
    long = long.assign(example=long["example"].str.replace("1024", "4096"), kl=long["kl"] * 3)
    wide(pd.concat([short, long])).to_csv(file := tmp_path / "rows.csv", index=False)
    made = text(read_wide(file))
    assert made.startswith(text(short))
    assert "2 tasks, examples of each: 20 at 1,024, 20 at 2,048, 10 at 4,096; half" in made
    (line,) = (each for each in made.splitlines() if each.startswith("| SnapKV has to see the question | holds: "))
    assert [cell.split()[1] for cell in line.split("|")[2:5]] == ["+1.19", "+2.20", "+3.27"]
    assert text(long).startswith("By length, 2 tasks, examples of each: 10 at 4,096")
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


def test_the_file_alone_makes_the_page(tmp_path, capsys):
    wide(rows(lambda method, question, ratio, number: ratio)).to_csv(file := tmp_path / "rows.csv", index=False)
    assert ruler_board.main(["--rows", str(file)]) == 0
    assert "2 tasks, 12 examples of each" in capsys.readouterr().out
    assert ruler_board.main([]) == 2
