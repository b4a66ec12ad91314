"""Imports point one way: every module of kvexp is parsed, and an import its layer is not allowed fails."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "kvexp"

# layer (kvexp/<layer>.py or kvexp/<layer>/) -> what it may import: other layers (leading dot) and third-party packages.
# Allowed to all: the standard library, the layer itself, kvexp.pipes, kvexp.terminal, and constants (`from
# kvexp import NUMERICS`).
# .methods.base stands for that module alone: the adapters know what a method looks like, and no particular method.
ALLOWED: dict[str, set[str]] = {
    "": set(),  # kvexp/__init__.py: constants, so that `import kvexp` costs nothing
    "errors": set(),
    "paths": {".errors"},
    "cache_folder": {"platformdirs"},
    "digests": {".errors", ".cache_folder"},
    "source_files": {".digests"},  # a user's module as files, without importing it
    "kept_text": set(),
    "pipes": set(),  # of every command line, so it stands below all layers
    "session": set(),  # what one command knows of itself: known to all who run something, knowing none of them
    "terminal": set(),  # of whatever is printed
    "console": {".session", "rich"},
    "hub": {"huggingface_hub"},  # comes with transformers and with datasets
    "core": {".errors", "torch", "triton"},  # triton: in ON_DEMAND alone
    "methods": {".errors", ".core", "torch"},
    # numpy: its legacy generator drew PQCache's first centroids
    "retrieval": {".errors", ".core", "torch", "numpy"},
    "models": {
        *(
            ".errors",
            ".paths",
            ".hub",
            ".cache_folder",
            ".digests",
            ".kept_text",
            ".core",
            ".methods.base",
            ".retrieval.base",
            ".retrieval.retrieval_layer",
        ),
        *("torch", "transformers", "tokenizers", "numpy", "safetensors"),
        *("gguf", "filelock", "tqdm"),  # where a GGUF file is converted; the last two come with huggingface_hub
        "jinja2",  # chat templates; comes with torch
        "peft",  # where an adapter is merged
    },
    "generate": {".errors", ".core", ".methods", ".retrieval", ".models", "torch", "transformers"},
    "reference_check": {".errors", ".core", ".methods", ".retrieval", ".models", ".generate", "torch", "numpy"},
    "articles": set(),
    "testbed": set(),
    "training": {".errors", ".testbed", ".calibrate", "torch", "transformers", "tokenizers", "rich"},
    "tasks": {
        *(".errors", ".paths", ".digests", ".hub", ".articles", ".testbed"),
        *("numpy", "datasets", "evaluate", "rouge_score", "nltk", "lm_eval", "huggingface_hub", "jieba"),
    },
    "build": {".errors", ".core"},  # core: on demand, when a cache is configured
    "lm_eval": {
        *(".user_methods", ".errors", ".build", ".core", ".methods", ".retrieval", ".models", ".generate", ".tasks"),
        *("torch", "lm_eval"),
    },
    "record": {".errors"},
    "log": {".errors", ".record", ".results", "numpy", "pandas", "wandb"},
    "results": {".errors", ".source_files", ".articles", ".console", ".record", "numpy", "pandas", "rich", "scipy"},
    "figures": {".errors", ".record", ".results", "numpy", "pandas", "matplotlib"},
    "evictions": {".errors", ".record", "numpy", "pandas", "pyarrow"},
    "report": {".errors", ".record", ".results", ".figures", ".evictions", "pandas", "plotly"},
    "dashboards": {".errors", ".log", ".results", ".figures", "pandas", "wandb", "wandb_workspaces"},
    "user_methods": {".errors", ".paths", ".source_files", ".core", "torch"},
    "config": {
        *(".user_methods", ".errors", ".digests", ".paths", ".build", ".core", ".methods", ".retrieval", ".models"),
        *(".hub", ".generate", ".tasks", ".lm_eval", ".record", ".session", "torch", "hydra", "omegaconf"),
    },
    "evaluate": {
        *(".errors", ".config", ".core", ".methods", ".retrieval", ".models", ".generate", ".tasks", ".lm_eval"),
        *(".record", ".console", ".session", "torch", "numpy", "rich"),
    },
    "sweep": {
        *(".user_methods", ".errors", ".build", ".config", ".evaluate", ".core", ".models", ".generate", ".tasks"),
        *(".record", ".log", ".results", ".console", ".session", ".paths", "torch", "hydra", "omegaconf"),
    },
    "dry_run": {
        *(
            ".errors",
            ".build",
            ".config",
            ".evaluate",
            ".sweep",
            ".core",
            ".methods",
            ".retrieval",
            ".models",
            ".generate",
        ),
        *(".tasks", ".record", ".results", ".session", ".cache_folder", "torch", "hydra", "omegaconf", "rich"),
    },
    "yardstick": {
        *(".errors", ".paths", ".config", ".evaluate", ".session", ".sweep", ".tasks", ".record"),
        *("hydra", "omegaconf", "lm_eval"),
    },
    "calibrate": {
        *(".errors", ".paths", ".articles", ".config", ".console", ".methods", ".models", ".session", ".sweep"),
        *("hydra", "omegaconf"),
    },
    "trace": {
        *(".errors", ".core", ".models", ".generate", ".diagnose", "torch", "numpy"),
    },
    "league": {
        *(".errors", ".paths", ".config", ".evaluate", ".generate", ".diagnose", ".record", ".results", ".session"),
        *(".sweep", "hydra", "omegaconf", "numpy"),
    },
    "custom_generate": {".errors", ".core", ".methods", ".models", "torch"},
    "curves": {  # kvexp.compare
        *(".errors", ".paths", ".user_methods", ".core", ".config", ".sweep", ".results", ".figures", ".session"),
        *("hydra", "omegaconf", "pandas", "matplotlib"),
    },
    "run": {".errors", ".paths", ".pipes", ".session", ".config", ".sweep", ".dry_run", "hydra", "omegaconf"},
    "cli": {".errors", ".paths", ".pipes", ".user_methods", ".run", ".sweep"},
    "__main__": {".cli"},  # kvexp/__main__.py
    "divergence": {
        *(".errors", ".console", ".core", ".methods", ".models", ".generate", ".tasks", ".config", ".evaluate"),
        *(
            ".diagnose",
            ".record",
            ".session",
            ".sweep",
            ".results",
            ".terminal",
            ".pipes",
            "torch",
            "numpy",
            "pandas",
            "rich",
        ),
    },
    "diagnose": {
        *(
            ".errors",
            ".core",
            ".methods",
            ".retrieval",
            ".models",
            ".generate",
            ".tasks",
            ".testbed",
            ".config",
            ".evaluate",
            ".session",
            ".sweep",
            ".evictions",
        ),
        *(
            ".record",
            ".results",
            ".figures",
            ".kept_text",
            ".console",
            ".paths",
            "torch",
            "omegaconf",  # reads the methods' own options
            "numpy",
            "pandas",
            "pyarrow",
            "matplotlib",
            "rich",
        ),
    },
}

# A GPU machine may hold torch and transformers (which bring numpy and safetensors) and nothing else of these.
NOT_NEEDED = (
    *("hydra", "omegaconf", "datasets", "evaluate", "rouge_score", "nltk", "lm_eval", "wandb", "pandas", "matplotlib"),
    *("accelerate", "triton"),
)

# Imported when asked for (observe=triton), never by importing anything else.
ON_DEMAND = {"kvexp.core.observe.triton_observe_kernels", "kvexp.core.decode.triton_decode_kernels"}


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
    if layer not in ALLOWED:
        return [f"{module}: the layer {layer!r} has no line in ALLOWED (tests/test_layers.py); add what it may import"]
    bad = []
    for line, name in imported(module, source, is_package):
        top = name.partition(".")[0]
        if top == "kvexp":
            whole, alone = f".{layer_of(name)}", name.removeprefix("kvexp")
            fine = layer_of(name) in {"", "pipes", "terminal", layer} or not {whole, alone}.isdisjoint(ALLOWED[layer])
        else:
            fine = top in sys.stdlib_module_names or top in ALLOWED[layer]
        if not fine:
            allowed = ", ".join(sorted(ALLOWED[layer])) or "nothing"
            bad.append(f"{module}:{line} imports {name}; {layer or 'kvexp/__init__.py'} may import {allowed}")
    return bad


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[module_name(path) for path in FILES])
def test_imports_point_one_way(path: Path) -> None:
    assert not violations(module_name(path), path.read_text(encoding="utf-8"), path.name == "__init__.py")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvexp.core.slots", "import transformers"),
        ("kvexp.core.slots", "import numpy as np"),
        ("kvexp.core.slots", "from kvexp.methods import base"),
        ("kvexp.core.slots", "from ..methods import base"),
        ("kvexp.core.slots", "def late():\n    from kvexp.generate import prefill"),
        ("kvexp.methods.h2o", "from transformers.cache_utils import Cache"),
        ("kvexp.methods.h2o", "from kvexp.models import load"),
        ("kvexp.models.load", "from kvexp.methods.h2o import H2O"),
        ("kvexp.models.load", "import kvexp.generate"),
        ("kvexp.record", "import torch"),
        ("kvexp.results", "import torch.nn as nn"),
        ("kvexp.figures", "from kvexp.core import slots"),
        ("kvexp.config", "import transformers"),
        ("kvexp.sweep", "import experiments.keyformer.fig7"),
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
        ("kvexp.core.slots", "from kvexp.errors import ConfigError\nfrom kvexp import NUMERICS"),
        ("kvexp.methods.h2o", "from kvexp.core import Attention\nfrom .base import Method\nfrom ..core import slots"),
        ("kvexp.models.load", "from kvexp.methods.base import Method\nfrom transformers.cache_utils import Cache"),
        ("kvexp.lm_eval", "from lm_eval.models.huggingface import HFLM"),
        ("kvexp.record", "from __future__ import annotations\nimport hashlib, json"),
    ],
)
def test_a_right_import_passes(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_a_package_resolves_its_own_dot() -> None:
    assert imported("kvexp.methods", "from .base import Method", is_package=True) == [(1, "kvexp.methods.base")]
    assert imported("kvexp.methods.h2o", "from .base import Method") == [(1, "kvexp.methods.base")]


def reachable(layer: str) -> set[str]:
    """Everything a layer may import, directly or through other layers; other layers by name with a leading dot."""
    seen: set[str] = set()
    todo = [layer]
    while todo:
        for name in ALLOWED[todo.pop()]:
            top = f".{layer_of(f'kvexp{name}')}" if name.startswith(".") else name  # ".methods.base" -> ".methods"
            if top not in seen:
                seen.add(top)
                if top.startswith("."):
                    todo.append(top[1:])
    return seen


@pytest.mark.parametrize("layer", ALLOWED)
def test_no_layer_reaches_itself(layer: str) -> None:
    assert f".{layer}" not in reachable(layer)


@pytest.mark.parametrize(
    "layer", ["", "errors", "articles", "record", "log", "results", "figures", "evictions", "report", "dashboards"]
)
def test_reading_results_needs_no_torch(layer: str) -> None:
    assert not {"torch", "transformers"} & reachable(layer)


def test_only_the_adapters_and_generate_know_transformers() -> None:
    assert {layer for layer, names in ALLOWED.items() if "transformers" in names} == {"models", "generate", "training"}


def import_without(modules: list[str], blocked: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Import the modules in a fresh interpreter in which the blocked packages are not to be found."""
    # None in sys.modules: `import x` raises ModuleNotFoundError and find_spec says None, as if x were not installed.
    code = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({list(blocked)!r}))\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
    )
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)


def modules_under(layer: str) -> list[str]:
    names = [module_name(path) for path in FILES]
    return [name for name in names if layer_of(name) == layer and name not in ON_DEMAND]


@pytest.mark.parametrize("layers", [("core", "methods", "retrieval"), ("models", "generate")], ids="-".join)
def test_imports_with_torch_and_transformers_alone(layers: tuple[str, ...]) -> None:
    modules = [name for layer in layers for name in modules_under(layer)]
    assert all(map(modules_under, layers))
    (needed,) = {"transformers" in reachable(layer) for layer in layers}  # so that one interpreter does for all
    without = (*NOT_NEEDED, *(() if needed else ("transformers",)))
    done = import_without(modules, without)
    assert done.returncode == 0, done.stderr


LIGHT = [
    "",
    "errors",
    "kept_text",
    "hub",
    "articles",
    "record",
    "log",
    "results",
    "figures",
    "evictions",
    "report",
    "dashboards",
]


@pytest.mark.parametrize("layer", LIGHT)
def test_imports_without_torch(layer: str) -> None:
    modules = modules_under(layer)
    if not modules:
        pytest.skip(f"kvexp/{layer} does not exist yet")
    for package in sorted(reachable(layer) & {"pandas", "matplotlib", "plotly", "wandb_workspaces"}):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; it comes with kvexp[eval]")
    done = import_without(modules, ("torch", "transformers"))
    assert done.returncode == 0, done.stderr
