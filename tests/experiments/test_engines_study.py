"""The recording of a shipped engine's evictions: which runs it is, and that it can be made, resumed and shown."""

from __future__ import annotations

import pytest

from experiments.studies.engines import EIGHT, FULL, SETTINGS, cells, main
from kvexp.generate.openvino import WHEEL

TESTBED = ["model=testbed_gqa", "task.max_prompt_tokens=400", "task.max_new_tokens=6"]


def test_every_cell_is_the_engine_and_its_twin(tmp_path):
    made = cells(tmp_path, ["news"], (256, 512), 2, TESTBED)
    assert [cell.setting for cell in made] == [FULL, *SETTINGS, *SETTINGS, EIGHT]
    assert all(cell.engine.engine is not None for cell in made)
    for cell in made[:-1]:
        assert cell.twin is not None and cell.twin.engine is None and cell.twin.model.weights == "float16"
        assert cell.twin.method == cell.engine.method and cell.twin.budget == cell.engine.budget
    assert made[-1].twin is None and made[-1].engine.engine.cache == "u8"


def test_a_recording_is_made_shown_and_planned(tmp_path, capsys):
    pytest.importorskip("openvino_genai", reason=f"needs {WHEEL}: pip install 'kvexp[openvino]'")
    asked = [str(tmp_path), "--task", "news", "--size", "256", "--limit", "2", "--words", *TESTBED]
    assert main(["plan", *asked]) != 0  # nothing says how long a row takes
    capsys.readouterr()
    assert main(["record", *asked]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(said) == 2 + 1 + len(SETTINGS) + 1
    assert main(["table", *asked]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")] == said
    assert main(["plan", *asked]) == 0
    assert "11 runs, 22 rows" in capsys.readouterr().out
