"""kvexp custom-generate FOLDER: write the folder that `model.generate(custom_generate=FOLDER)` takes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvexp import NUMERICS, __version__
from kvexp.custom_generate.flatten import flattened, requirements
from kvexp.errors import ConfigError
from kvexp.terminal import say

README = """# KV-cache eviction for `generate`

Made by kvexp {version} (NUMERICS {numerics}) with `kvexp custom-generate`, from its own modules.
Do not edit it: make it again.

    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained(NAME)
    tokenizer = AutoTokenizer.from_pretrained(NAME)
    inputs = tokenizer(TEXT, return_tensors="pt")
    model.generate(**inputs, custom_generate="{folder}", trust_remote_code=True, method="keyformer", kv_ratio=0.5,
                   max_new_tokens=64)

`method`: {methods}. `kv_ratio` or `budget_tokens`; `method_options`, `cache_options`, `seed`. Families: {families}.
Pad on the left. The model is left as it was; the cache holds no more than its budget after the prompt.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 where the folder cannot be made."""
    parser = argparse.ArgumentParser(prog="kvexp custom-generate", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="made where it is not there")
    args = parser.parse_args(argv)
    try:
        count = write_folder(args.folder)
    except ConfigError as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        say(f"error: {error.strerror or error}", file=sys.stderr)
        return 2
    say(f"wrote {args.folder} ({count} files)")
    return 0


def write_folder(folder: Path) -> int:
    """Write FOLDER/custom_generate and FOLDER/README.md; returns the number of files. Older files of it are removed."""
    from kvexp.custom_generate.entry import METHODS
    from kvexp.models.families import FAMILIES

    inner = folder / "custom_generate"
    inner.mkdir(parents=True, exist_ok=True)
    made = flattened() | {"requirements.txt": requirements()}
    for old in inner.glob("*.py"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        (inner / name).write_text(text, encoding="utf-8")
    families = ", ".join(sorted(FAMILIES))
    words = {"methods": ", ".join(f"`{name}`" for name in sorted(METHODS)), "families": families, "folder": folder.name}
    readme = README.format(version=__version__, numerics=NUMERICS, **words)
    (folder / "README.md").write_text(readme, encoding="utf-8")
    return len(made) + 1
