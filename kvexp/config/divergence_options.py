"""Whether and how a run's divergence from the full cache is measured: no part of what identifies the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvexp.build import typed
from kvexp.errors import ConfigError
from kvexp.record.divergence_lines import EPSILON_KL, EPSILON_TOP1, OWN, TEXTS

if TYPE_CHECKING:
    from kvexp.config.settings import Settings

AUTO, ONLY, BOTH = "auto", "only", "both"


@dataclass(frozen=True)
class DivergenceOptions:
    """texts: the kinds of text that are forced, none where nothing is measured. only: no answers are generated."""

    texts: tuple[str, ...] = ()
    only: bool = False

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> DivergenceOptions:
        """Of a composed configuration; ConfigError names the key. Configurations of before know no divergence.

        "auto" is true here: whoever knows that a run is no part of a sweep has put `decided` in its place.
        """
        asked, text = config.get("divergence", False), config.get("divergence_text", OWN)
        if not (isinstance(asked, bool) or asked in (AUTO, ONLY)):
            raise ConfigError(f"divergence must be {AUTO}, true, false or {ONLY}, got {asked!r}")
        if text not in (*TEXTS, BOTH):
            raise ConfigError(f"divergence_text must be one of {', '.join((*TEXTS, BOTH))}, got {text!r}")
        for name, default in (("epsilon_kl", EPSILON_KL), ("epsilon_top1", EPSILON_TOP1)):
            value = typed(config.get(name, default), float, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} must be a positive number, got {value:g}")
        return cls((TEXTS if text == BOTH else (text,)) if asked else (), only=asked == ONLY)


def decided(config: Mapping[str, Any], overrides: Sequence[str], *, sweep: bool) -> Any:
    """The value of `divergence` for a job of a command: auto is true in a sweep and false of a single run.

    overrides: as typed; ConfigError where they name a text that no run would be forced.
    """
    asked = config.get("divergence", False)
    if asked != AUTO:
        return asked
    if not sweep and any(word.lstrip("+").partition("=")[0] == "divergence_text" for word in overrides):
        raise ConfigError(
            f"divergence_text={config.get('divergence_text')} has no effect: divergence=auto measures nothing of a "
            "single run; add divergence=true, or leave divergence_text out"
        )
    return sweep


def refusal(settings: Settings) -> str | None:
    """Why a run has no divergence, in the user's words; None if it has one."""
    from kvexp.models.half_precision import one_row_per_forward
    from kvexp.tasks import LMEval

    decoding, task = settings.decoding, settings.task
    if settings.is_baseline:
        return "the full cache is what divergence is measured from"
    if isinstance(task, LMEval):
        return "lm-eval's items are scored under their own protocol: their flips are counted from the rows"
    if task.has_turns:
        return f"the rows of task={task.name} say how far each turn is from the full cache (info.kl)"
    if not generates(settings):
        return f"task={task.name} scores given texts itself: flips and divergence over choices come from the rows"
    if decoding.num_beams > 1:
        return "beams take over one another's caches: there is no one path to compare (generation=greedy)"
    if decoding.sample:
        return "sampled answers differ by chance: divergence follows the greedy answer (generation=greedy)"
    if decoding.prefill_chunk is not None:
        return "prompts are prefilled in chunks, which runs cannot share (generation.prefill_chunk=null)"
    if settings.method.modifies_prefill:
        return f"{settings.method.name} changes what the prompt's own tokens attend to: its prefill cannot be shared"
    if one_row_per_forward(settings.model.dtype, settings.model.resolved_device()):
        return "in half precision on a CPU rows of one batch round otherwise than alone (model.dtype=float32)"
    return None


def generates(settings: Settings) -> bool:
    """Whether the task's answers are generated: only they are a text along which methods can be compared."""
    from kvexp.tasks import LMEval, Task

    task = settings.task
    return not (isinstance(task, LMEval) or task.only_nll or type(task).score_choices is not Task.score_choices)
