"""engine=openvino: a run's settings as OpenVINO GenAI's, and what it cannot be asked."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from kvexp.generate.engine import model_file
from kvexp.generate.openvino import BLOCK, Engine, Eviction, OpenVINO, genai
from kvexp.methods import OpenVINO as Policy
from kvexp.run.model_spec import max_positions, model_digest
from kvexp.util.errors import Rule

if TYPE_CHECKING:
    from kvexp.hf.load import Model
    from kvexp.run.settings import Settings


def _policy(c: Settings) -> Policy | None:
    return c.method if isinstance(c.method, Policy) else None


REFUSED: tuple[Rule[Settings], ...] = (
    (
        lambda c: c.method.name not in ("full", "openvino"),
        "engine=openvino evicts by a rule of its own: set method=openvino or method=full, got method={c.method.name}",
    ),
    (
        lambda c: c.budget is not None and c.budget.tokens is None,
        "engine=openvino holds one number of tokens whatever the prompt: set budget=tokens budget.tokens=N in place of "
        "a ratio",
    ),
    (
        lambda c: c.budget and (c.budget.tokens or 0) % BLOCK,
        f"engine=openvino counts in blocks of {BLOCK} tokens: budget.tokens must be a multiple of {BLOCK}, got "
        "{c.budget.tokens}",
    ),
    (
        lambda c: (policy := _policy(c)) and policy.block != BLOCK,
        f"engine=openvino has blocks of {BLOCK} tokens on a CPU: set method.block={BLOCK}, got {{c.method.block}}",
    ),
    (
        lambda c: (policy := _policy(c)) and policy.aggregation == "adaptive_rkv",
        "method.aggregation=adaptive_rkv does not run in engine=openvino 2026.4.1 on a CPU, which never computes the "
        "diversity that it asks for: set sum or norm_sum, or leave out engine",
    ),
    (
        lambda c: c.budget and not c.budget.counts_self,
        "engine=openvino has no budget.counts_self=false: leave it out",
    ),
    (
        lambda c: c.cache.renumbered,
        "engine=openvino keeps original positions: leave out cache.positions",
    ),
)


def eviction_of(settings: Settings) -> Eviction | None:
    """The engine's own setting for the run's method and budget; None for its full cache."""
    policy = _policy(settings)
    if policy is None:
        return None
    assert settings.budget is not None and settings.budget.tokens is not None
    return Eviction(
        settings.budget.tokens,
        policy.start_size,
        policy.recent_size,
        policy.aggregation,
        policy.window,
        policy.crush,
        policy.anchor,
        policy.crush_seed,
    )


@functools.lru_cache(maxsize=1)
def _loaded(gguf: Path, tokens: int, eviction: Eviction | None, options: OpenVINO, threads: int) -> Engine:
    return Engine(gguf, tokens, eviction, options, threads=threads)


class OpenVINODriver:
    """OpenVINO GenAI for runs."""

    options, refused = OpenVINO, REFUSED

    @staticmethod
    def check_installed() -> None:
        """ConfigError where the wheel is not installed."""
        genai()

    @staticmethod
    def engine(settings: Settings, model: Model, _seed: int) -> Engine:
        """The pipeline with the model in float16; kept until another is asked for."""
        import torch

        assert isinstance(settings.engine, OpenVINO)
        gguf, tokens = model_file(model, model_digest(settings.model)), max_positions(settings.model)
        return _loaded(gguf, tokens, eviction_of(settings), settings.engine, torch.get_num_threads())
