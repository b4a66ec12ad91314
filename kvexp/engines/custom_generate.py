"""kvexp's eviction for `model.generate(custom_generate=FOLDER)` of transformers: a folder made of kvexp's modules.

transformers copies nothing but files in the folder of `generate.py`. So, starting from one module, every module of
kvexp that it imports, however deep, becomes a file named after its dotted name (kvexp.core.slots: core_slots.py), and
imports of kvexp become relative ones. Nothing else of a source is touched.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from kvexp import NUMERICS, __version__
from kvexp.util import ConfigError, say, tells_errors

ENTRY, ENTRY_FILE = "kvexp.engines.custom_generate_entry", "generate"
ROOT = Path(__file__).resolve().parents[2]
# Names under which a patched model is known. The folder has its own, so that it works where kvexp is installed too.
OWN_NAMES = {
    'ATTN_IMPLEMENTATION = "kvexp"': 'ATTN_IMPLEMENTATION = "kvexp_custom_generate"',
    '_RECORD = "_kvexp_patch"': '_RECORD = "_kvexp_custom_generate_patch"',
}
# Modules that import this at their top are left out: it is not everywhere, and they are imported only when asked for.
LEFT_OUT = re.compile(r"^(?:import|from) triton\b", re.MULTILINE)


def flat_name(module: str) -> str:
    """The file, without its ending, of a module of kvexp."""
    return ENTRY_FILE if module == ENTRY else module.replace("kvexp.", "", 1).replace(".", "_")


def source_of_module(module: str) -> str | None:
    """The source of a module of kvexp; None where there is no such module. Of the package itself, what others read."""
    if module == "kvexp":
        return f'"""Numbers that the modules here read."""\n\n__version__ = "{__version__}"\nNUMERICS = {NUMERICS}\n'
    base = ROOT.joinpath(*module.split("."))
    found = [file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()]
    return found[0].read_text("utf-8") if found else None


def flattened() -> dict[str, str]:
    """File name -> text of the entry module and of everything of kvexp that it imports."""
    made: dict[str, str] = {}
    todo = [ENTRY]
    while todo:
        module = todo.pop()
        name = f"{flat_name(module)}.py"
        if name not in made:
            text = source_of_module(module)
            assert text is not None
            made[name], imported = relative(module, text)
            todo += imported
    return dict(sorted(made.items()))


def relative(module: str, text: str) -> tuple[str, list[str]]:
    """The source of a module with relative imports of kvexp and the folder's own names; the modules it imports."""
    lines, modules = text.split("\n"), list[str]()
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in sorted(found, key=lambda node: -node.lineno):
        if isinstance(node, ast.Import):
            if any(alias.name.split(".")[0] == "kvexp" for alias in node.names):
                raise ConfigError(f"{module}: write from kvexp... import ..., which can be made relative")
        elif node.level:
            raise ConfigError(f"{module}: a relative import, which kvexp has none of")
        elif (node.module or "").split(".")[0] == "kvexp":
            lines[node.lineno - 1 : node.end_lineno], imported = _relative_import(node)
            modules += imported
    text = "\n".join(lines)
    for old, new in OWN_NAMES.items():
        text = text.replace(old, new)
    return text, modules


def _relative_import(node: ast.ImportFrom) -> tuple[list[str], list[str]]:
    """Lines in place of `from kvexp.a import x, y`, modules from files of their own; the modules they import."""
    assert node.module is not None
    pad = " " * node.col_offset
    lines, modules, names = [], [], []
    for alias in node.names:
        full = f"{node.module}.{alias.name}"
        source = source_of_module(full)
        if source is None:
            names.append(alias.name if alias.asname is None else f"{alias.name} as {alias.asname}")
        elif LEFT_OUT.search(source):
            lines.append(f'{pad}raise ImportError("{full} is not part of this folder: install kvexp")')
        else:
            flat = flat_name(full)
            # The first line is what transformers looks for when it copies files.
            lines.append(f"{pad}from .{flat} import __name__ as _")
            lines.append(f"{pad}from . import {flat} as {alias.asname or alias.name}")
            modules.append(full)
    if names:
        lines.insert(0, f"{pad}from .{flat_name(node.module)} import {', '.join(names)}")
        modules.append(node.module)
    return lines, modules


def requirements() -> str:
    """requirements.txt of the folder: the packages without which it does not work, as kvexp itself wants them."""
    try:
        known = requires("kvexp") or []
    except PackageNotFoundError:
        raise ConfigError(
            "kvexp is not installed as a package, so what it needs is not known: pip install -e ."
        ) from None
    return "".join(f"{line}\n" for line in known if re.match(r"(torch|transformers)\b(?!.*extra)", line))


README = """# KV-cache eviction for `generate`

Made by kvexp {version} (NUMERICS {numerics}) with `kvexp export transformers`, from its own modules.
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


@tells_errors(ConfigError, OSError)
def main(argv: Sequence[str] | None = None) -> int:
    """`kvexp export transformers FOLDER`: write the folder that `model.generate(custom_generate=FOLDER)` takes."""
    parser = argparse.ArgumentParser(prog="kvexp export transformers", description=main.__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="made where it is not there")
    args = parser.parse_args(argv)
    count = write_folder(args.folder)
    say(f"wrote {args.folder} ({count} files)")
    return 0


def write_folder(folder: Path) -> int:
    """Write FOLDER/custom_generate and FOLDER/README.md; returns the number of files. Older files of it are removed."""
    from kvexp.engines.custom_generate_entry import METHODS
    from kvexp.hf.traits import VERIFIED

    inner = folder / "custom_generate"
    inner.mkdir(parents=True, exist_ok=True)
    made = flattened() | {"requirements.txt": requirements()}
    for old in inner.glob("*.py"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        (inner / name).write_text(text, encoding="utf-8")
    families = ", ".join(sorted(VERIFIED))
    words = {"methods": ", ".join(f"`{name}`" for name in sorted(METHODS)), "families": families, "folder": folder.name}
    readme = README.format(version=__version__, numerics=NUMERICS, **words)
    (folder / "README.md").write_text(readme, encoding="utf-8")
    return len(made) + 1
