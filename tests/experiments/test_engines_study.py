"""The recording of a shipped engine's evictions: which runs it is, and that it can be made, resumed and shown."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.studies.engines import BEGIN, EIGHT, END, FORMATS, FULL, RIVALS, SETTINGS, cells, main, tables
from kvexp.generate.openvino import WHEEL
from kvexp.run.batches import evaluate_run, measure_rest, opened
from kvexp.run.session import Session
from kvexp.run.store import Run, run_hash
from kvexp.util.errors import ConfigError

TESTBED = ["model=testbed_gqa", "task.max_prompt_tokens=400", "task.max_new_tokens=6"]


def test_every_cell_is_the_engine_and_its_twin_or_kvexps_own_with_as_many_slots(tmp_path):
    made = cells(tmp_path, ["news"], (256, 512), 2, TESTBED)
    assert [cell.setting for cell in made] == [FULL, EIGHT, *FORMATS, *[*SETTINGS, *RIVALS] * 2]
    for cell in made:
        assert cell.own.engine is None and cell.own.model.weights == "float16"
        assert cell.own.divergence.texts == (() if cell.setting == FULL else ("own",))
        if cell.setting in RIVALS:
            assert cell.engine is None and cell.own.budget.tokens == cell.size + 32
        elif cell.setting in FORMATS:
            assert cell.engine is None and cell.own.cache.quantization is not None
        else:
            assert cell.own.method == cell.engine.method and cell.own.budget == cell.engine.budget
    assert made[1].engine.engine.cache == "u8"
    assert len({str(run.identity) for cell in made for run in cell.runs}) == 2 * len(made) - len(FORMATS) - 8


def test_a_recording_is_made_shown_and_planned(tmp_path, capsys):
    pytest.importorskip("openvino_genai", reason=f"needs {WHEEL}: pip install 'kvexp[openvino]'")
    asked = [str(tmp_path), "--task", "news", "--size", "256", "--limit", "2", "--words", *TESTBED]
    assert main(["plan", *asked]) != 0  # nothing says how long a row takes
    capsys.readouterr()
    assert main(["record", *asked]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    own = len(SETTINGS) + len(RIVALS)
    assert len(said) == 3 * 2 + 2 + len(FORMATS) + len(SETTINGS) + 2 + len(FORMATS) + own + len(SETTINGS)
    twins = [line.split(" | ") for line in said if line.split(" | ")[1] in SETTINGS and line.startswith("| Open")]
    assert len(twins) == len(SETTINGS) and all(float(cells[4]) > 0 for cells in twins)  # of twins that stand
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\n{END}\nafter")
    assert main(["table", *asked[:-4], "--page", str(page), *asked[-4:]]) == 0
    text = page.read_text()
    assert [line for line in text.splitlines() if line.startswith("|")] == said and text.endswith("after")
    capsys.readouterr()
    assert main(["plan", *asked]) == 0
    assert "19 runs, 38 rows" in capsys.readouterr().out


def test_tables_are_of_the_examples_that_all_cells_have(tmp_path):
    """Rows of kvexp alone stand for an engine's: what is shown is the same for both."""
    two, one = (cells(tmp_path, ["news"], (256,), limit, TESTBED) for limit in (2, 1))
    made = [next(cell for cell in each if cell.setting == FULL) for each in (two, one)]
    for _, run in opened([made[0].engine]):
        run.append(*evaluate_run(made[0].own).rows())
    h2o = next(cell for cell in one if cell.setting == "h2o")
    evaluate_run(h2o.own)
    measure_rest(h2o.own, Session())
    found = tables(two)
    assert "`task=news`, n = 1, " in found and "in 1 of 1." in found
    (line,) = [line for line in found.splitlines() if line.startswith(f"| OpenVINO | {FULL} |")]
    assert line.split(" | ")[4:6] == ["0", "100 %"]
    expected = next(iter(Run.load(tmp_path / run_hash(h2o.own.identity)).divergence().values()))
    shown = next(line for line in found.splitlines() if line.startswith("| 256 | h2o |")).split(" | ")[2]
    assert float(shown.partition(";")[0]) == pytest.approx(np.mean(expected["kl"][1:]), rel=0.05)
    with pytest.raises(ConfigError, match="record it first"):
        tables(cells(tmp_path / "other", ["news"], (256,), 2, TESTBED))
