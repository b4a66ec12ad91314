"""Models whose attention has sinks or a softcap: which they are, and what is refused of them."""

from __future__ import annotations

import re
from pathlib import Path

import transformers

from kvexp.hf.traits import SINK_TYPES

# Types that kvexp does not evict from, or whose sinks are in layers with a window alone, which it leaves to the model.
OTHERS = {"deepseek_v4", "hy_v4", "mimo_v2_flash", "openai_privacy_filter"}


def test_every_type_that_hands_sinks_to_attention_is_known() -> None:
    found = set()
    for file in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        text = file.read_text()
        if re.search(r"\bs_aux=", text):
            found.add(file.stem.removeprefix("modeling_"))
    assert found == SINK_TYPES | OTHERS
