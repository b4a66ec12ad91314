"""Imports point one way: every module of kvexp is parsed, and an import its layer is not allowed fails."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "kvexp"

LAB = {"numpy", "pandas", "pyarrow", "rich", "scipy", "matplotlib"}  # what tables and figures are made with
CONFIGURED = {"hydra", "omegaconf", "yaml"}
# Layer (kvexp/<layer>.py or kvexp/<layer>/) -> the layers below it that it may know, and third-party packages. Each may
# know itself, the standard library and the constants of `kvexp`.
LAYERS: dict[str, tuple[str, set[str]]] = {
    "util": ("", {"huggingface_hub", "platformdirs", "rich"}),
    "core": ("util", {"torch", "triton"}),  # triton: in ON_DEMAND alone
    "methods": ("util core", {"torch", "numpy"}),  # numpy: C++'s generator, which draws OpenVINO's anchors
    "retrieval": ("util core", {"torch", "numpy"}),  # numpy: its legacy generator drew PQCache's first centroids
    "hf": (
        "util core retrieval.method retrieval.layer",
        {
            "torch",
            "transformers",
            "tokenizers",
            "numpy",
            "safetensors",
            "gguf",
            "huggingface_hub",
            "filelock",
            "tqdm",
            "peft",
            "jinja2",
        },
    ),
    "generate": ("util core methods retrieval hf", {"torch", "transformers", "numpy", "gguf"}),
    "tasks": (
        "util",
        {
            "numpy",
            "datasets",
            "evaluate",
            "rouge_score",
            "nltk",
            "lm_eval",
            "huggingface_hub",
            "jieba",
            "math_verify",
            "langdetect",
        },
    ),
    "lm_eval": ("util core methods retrieval hf generate tasks", {"torch", "lm_eval"}),
    "run": (
        "util core methods retrieval hf generate tasks lm_eval",
        {"torch", "transformers", "numpy", "pandas", "pyarrow", "rich", "lm_eval", *CONFIGURED},
    ),
    "results": ("util core tasks run", {"plotly", "wandb", *LAB, *CONFIGURED}),
    "diagnose": ("util core methods retrieval hf generate tasks run results", {"torch", "omegaconf", *LAB}),
    "gate": ("util generate hf tasks run results", {"httpx", "torch", "transformers", *LAB}),
    "engines": ("util core methods hf generate run diagnose", {"torch", "numpy"}),
    "cli": ("util run", set()),
}
TOP = {  # kvexp/__init__.py: constants, and functions that import late, of types alone; kvexp/__main__.py: the command
    "": "core hf results tasks",
    "__main__": "cli results",
}

# A GPU machine may hold torch and transformers (which bring numpy and safetensors) and nothing else of these.
NOT_NEEDED = (
    *("hydra", "omegaconf", "datasets", "evaluate", "rouge_score", "nltk", "lm_eval", "wandb", "pandas", "matplotlib"),
    *("accelerate", "triton"),
)
ON_DEMAND = {"kvexp.core.triton_kernels"}  # imported when asked for (observe=triton), never by importing anything else
WITH_TORCH = {
    "kvexp.results.advise_search",
    "kvexp.results.curves",
    "kvexp.results.sweep_callback",
    "kvexp.gate.local",
}  # what runs, as well as reads


def layer_of(module: str) -> str:
    """The layer a dotted module name belongs to: "kvexp.core.slots" -> "core", "kvexp" -> ""."""
    return module.partition(".")[2].partition(".")[0]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def exists(module: str) -> bool:
    base = ROOT.joinpath(*module.split("."))
    return base.with_suffix(".py").is_file() or base.is_dir()


def imported(module: str, source: str, is_package: bool = False) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of everything the source imports, also inside functions and `if TYPE_CHECKING`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = node.level - 1 if is_package else node.level  # a package's `.` is the package itself
            here = module.split(".")[: len(module.split(".")) - up] if node.level else []
            start = ".".join([*here, *([node.module] if node.module else [])])
            for alias in node.names:  # `from kvexp import core` imports a module, `from kvexp import NUMERICS` does not
                name = f"{start}.{alias.name}"
                found.append((node.lineno, name if start.startswith("kvexp") and exists(name) else start))
    return found


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    layer = layer_of(module)
    if layer in TOP:
        below, packages = TOP[layer].split(), set()
    elif layer not in LAYERS:
        return [f"{module}: the layer {layer!r} has no line in LAYERS (tests/test_layers.py)"]
    else:
        below, packages = LAYERS[layer][0].split(), LAYERS[layer][1]
    bad = []
    for line, name in imported(module, source, is_package):
        top = name.partition(".")[0]
        if top == "kvexp":
            fine = layer_of(name) in {"", layer, *below} or name.removeprefix("kvexp.") in below
        else:
            fine = top in sys.stdlib_module_names or top in packages
        if not fine:
            bad.append(f"{module}:{line} imports {name}; {layer or 'kvexp'} may import {' '.join([*below, *packages])}")
    return bad


FILES = sorted(PACKAGE.rglob("*.py"))


def test_imports_point_one_way() -> None:
    found = [violations(module_name(path), path.read_text("utf-8"), path.name == "__init__.py") for path in FILES]
    assert not [each for each in found if each]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvexp.core.slots", "import transformers"),
        ("kvexp.core.slots", "from kvexp.methods import base"),
        ("kvexp.core.slots", "from ..methods import base"),
        ("kvexp.core.slots", "def late():\n    from kvexp.generate import prefill"),
        ("kvexp.methods.h2o", "from kvexp.hf import load"),
        ("kvexp.hf.load", "from kvexp.methods.h2o import H2O"),
        ("kvexp.run", "import experiments.keyformer"),
        ("kvexp", "import torch"),
        ("kvexp.newcomer", "import json"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvexp.core.slots", "import math, torch\nimport torch.nn as nn\nfrom . import budget\nfrom .budget import x"),
        ("kvexp.core.slots", "from kvexp.util.errors import ConfigError\nfrom kvexp import NUMERICS"),
        ("kvexp.methods.h2o", "from kvexp.core import Attention\nfrom .base import Method\nfrom ..core import slots"),
        ("kvexp.hf.load", "from kvexp.core.method import Method\nfrom transformers.cache_utils import Cache"),
    ],
)
def test_a_right_import_passes(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_a_package_resolves_its_own_dot() -> None:
    assert imported("kvexp.methods", "from .base import Method", is_package=True) == [(1, "kvexp.methods.base")]
    assert imported("kvexp.methods.h2o", "from .base import Method") == [(1, "kvexp.methods.base")]


def test_layers_stand_one_above_the_other() -> None:
    order = list(LAYERS)
    for place, (layer, (below, _)) in enumerate(LAYERS.items()):
        assert {name.partition(".")[0] for name in below.split()} <= set(order[:place]), layer


def import_without(*steps: tuple[list[str], tuple[str, ...]]) -> None:
    """Import modules in a fresh interpreter in which the packages beside them are not to be found, in steps."""
    # None in sys.modules: `import x` raises ModuleNotFoundError and find_spec says None, as if x were not installed.
    code = (
        "import importlib, sys\n"
        f"for modules, blocked in {steps!r}:\n"
        "    sys.modules.update(dict.fromkeys(blocked))\n"
        "    for name in modules:\n"
        "        importlib.import_module(name)\n"
        "    for name in blocked:\n"
        "        del sys.modules[name]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def modules_under(layer: str) -> list[str]:
    names = [module_name(path) for path in FILES]
    return [name for name in names if layer_of(name) == layer and name not in ON_DEMAND]


def test_imports_with_torch_and_transformers_alone() -> None:
    bare, with_models = (
        [name for layer in layers for name in modules_under(layer)]
        for layers in (("core", "methods", "retrieval"), ("hf", "generate"))
    )
    assert bare and with_models
    import_without((bare, (*NOT_NEEDED, "transformers")), (with_models, NOT_NEEDED))


def test_imports_without_torch() -> None:
    modules = ["kvexp", "kvexp.util", "kvexp.cli", "kvexp.run.store"]
    if importlib.util.find_spec("pandas") is not None:  # it comes with kvexp[eval]
        modules += [name for layer in ("results", "gate") for name in modules_under(layer) if name not in WITH_TORCH]
    import_without((modules, ("torch", "transformers")))
