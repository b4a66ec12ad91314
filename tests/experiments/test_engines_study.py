"""The recording of a shipped engine's evictions: which runs it is, and that it can be made, resumed and shown."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from experiments.studies.engines import EIGHT, FULL, RIVALS, SETTINGS, cells, main, table
from kvexp.generate.openvino import WHEEL
from kvexp.run.batches import evaluate_run, measure_rest, opened
from kvexp.run.session import Session
from kvexp.run.store import Run, run_hash
from kvexp.util.errors import ConfigError

TESTBED = ["model=testbed_gqa", "task.max_prompt_tokens=400", "task.max_new_tokens=6"]


def test_every_cell_is_the_engine_and_its_twin_or_kvexps_own_with_as_many_slots(tmp_path):
    made = cells(tmp_path, ["news"], (256, 512), 2, TESTBED)
    assert [cell.setting for cell in made] == [FULL, EIGHT, *[*SETTINGS, *RIVALS] * 2]
    for cell in made:
        assert cell.own.engine is None and cell.own.model.weights == "float16"
        assert cell.own.divergence.texts == (() if cell.setting == FULL else ("own",))
        if cell.setting in RIVALS:
            assert cell.engine is None and cell.own.budget.tokens == cell.size + 32
        else:
            assert cell.own.method == cell.engine.method and cell.own.budget == cell.engine.budget
    assert made[1].engine.engine.cache == "u8"
    assert len({str(run.identity) for cell in made for run in cell.runs}) == 2 * len(made) - 8


def test_a_recording_is_made_and_shown(tmp_path):
    pytest.importorskip("openvino_genai", reason=f"needs {WHEEL}: pip install 'kvexp[openvino]'")
    asked = [str(tmp_path), "--task", "news", "--size", "256", "--limit", "2", "--words", *TESTBED]
    assert main(["record", *asked]) == 0
    assert main(["table", *asked[:-4], "--csv", str(tmp_path / "table.csv"), *asked[-4:]]) == 0
    made = pd.read_csv(tmp_path / "table.csv").set_index("setting")
    assert list(made.index) == [FULL, EIGHT, *SETTINGS, *RIVALS]
    twins = made.loc[list(SETTINGS)]
    assert twins["stands"].all() and twins["equal"].eq(2).all() and twins["kl"].gt(0).all()
    assert made["kl_third_3"].notna().sum() >= len(SETTINGS)


def test_tables_are_of_the_examples_that_all_cells_have(tmp_path):
    """Rows of kvexp alone stand for an engine's: what is shown is the same for both."""
    two, one = (cells(tmp_path, ["news"], (256,), limit, TESTBED) for limit in (2, 1))
    made = [next(cell for cell in each if cell.setting == FULL) for each in (two, one)]
    for _, run in opened([made[0].engine]):
        run.append(*evaluate_run(made[0].own).rows())
    h2o = next(cell for cell in one if cell.setting == "h2o")
    evaluate_run(h2o.own)
    measure_rest(h2o.own, Session())
    made = table(two).set_index("setting")
    assert made["n"].eq(1).all() and list(made.loc[FULL, ["equal", "kl", "same_percent"]]) == [1, 0, 100]
    expected = next(iter(Run.load(tmp_path / run_hash(h2o.own.identity)).divergence().values()))
    assert made.loc["h2o", "kl"] == pytest.approx(np.mean(expected["kl"][1:]), rel=0.05)
    with pytest.raises(ConfigError, match="record it first"):
        table(cells(tmp_path / "other", ["news"], (256,), 2, TESTBED))
