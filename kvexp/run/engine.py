"""An engine in place of kvexp's own model and cache: what it can be asked, and its answers as a run records them.

`DRIVERS` is the one list of engines; a `Driver` says how a run's settings become a loaded `Engine`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from kvexp.generate.engine import Engine, EngineAnswer, check_family, kl_of
from kvexp.generate.inputs import EvictionStats, eos_ids
from kvexp.run.build import made
from kvexp.run.engine_llama_cpp import LlamaCppDriver
from kvexp.run.engine_openvino import OpenVINODriver
from kvexp.run.labels import generates
from kvexp.run.model_spec import config_of_spec, generation_config_of
from kvexp.util.errors import ConfigError, Rule, refuse
from kvexp.util.fields import typed

if TYPE_CHECKING:
    from kvexp.generate.engine import ForcedEngine
    from kvexp.generate.kl import KL
    from kvexp.hf.load import Model, Tokenizer
    from kvexp.run.answers import ModelOutput
    from kvexp.run.settings import Settings


class Options(Protocol):
    """Settings of an engine, as conf/engine/NAME.yaml has them; name: the engine's.

    gives_logits: whether it tells distributions along a given text (`ForcedEngine`), so that KL is measured.
    halves: what of it sums in half precision, by the number of threads; empty for nothing.
    """

    @property
    def name(self) -> str: ...

    @property
    def gives_logits(self) -> bool: ...

    @property
    def halves(self) -> str: ...

    def identity(self) -> dict[str, Any]:
        """What identifies the engine of a run: its version and every setting; ConfigError where it is not known."""

    def reference(self) -> Options:
        """The setting of the full cache that runs with these settings are measured from."""


class Driver(Protocol):
    """An engine as runs use it. options: the class of its settings; refused: what it cannot be asked."""

    @property
    def options(self) -> type[Options]: ...

    @property
    def refused(self) -> tuple[Rule[Settings], ...]: ...

    def check_installed(self) -> None:
        """ConfigError where the engine's package is not installed."""

    def engine(self, settings: Settings, model: Model, seed: int) -> Engine:
        """The engine with the model and the run's settings; weights are kept until others are asked for.

        seed: of the noise of the run's method.
        """


DRIVERS: dict[str, Driver] = {driver.options.name: driver for driver in (OpenVINODriver(), LlamaCppDriver())}


def engine_of(config: Mapping[str, Any]) -> Options | None:
    """The option of `engine` of a resolved configuration; None for kvexp itself, and in older ones."""
    node = dict(typed(config.get("engine", {}), dict, "engine"))
    name = typed(node.pop("name", None), str | None, "engine.name")
    if name is None:
        if node:
            raise ConfigError(f"engine=none has no {', '.join(map(str, node))}; choose engine={' or '.join(DRIVERS)}")
        return None
    if name not in DRIVERS:
        raise ConfigError(f"engine.name must be one of {', '.join(DRIVERS)}, got {name!r}")
    options: Options = made(DRIVERS[name].options, node, "engine")
    return options


def driver_of(settings: Settings) -> Driver:
    """The driver of the run's engine."""
    assert settings.engine is not None
    return DRIVERS[settings.engine.name]


# What no engine can be asked; each driver has more.
REFUSED: tuple[Rule[Settings], ...] = (
    (
        lambda c: not generates(c) or c.task.name == "lm_eval" or c.task.has_turns or c.task.needs_nll,
        "engine={c.engine.name} gives greedy answers and no log-probabilities of given texts, which task={c.task.name} "
        "asks for: take a task that generates one answer, or leave out engine",
    ),
    (
        lambda c: getattr(c.task, "question", None) == "after_eviction",
        "engine={c.engine.name} reads a prompt whole, its question too: set task.question=in_prompt",
    ),
    (
        lambda c: (d := c.decoding).sample or d.num_beams > 1 or d.stop_strings or d.prefill_chunk is not None,
        "engine={c.engine.name} is asked for greedy answers from whole prompts: set generation=greedy, and leave "
        "generation.stop_strings and generation.prefill_chunk alone",
    ),
    (
        lambda c: c.model.dtype != "float32" or c.model.weights is not None or c.model.resolved_device() != "cpu",
        "engine={c.engine.name} gets the weights of a model that is loaded in float32 on a CPU: set "
        "model.dtype=float32 model.weights=null model.device=cpu",
    ),
    (
        lambda c: c.cache.quantization is not None or c.cache.beyond_context or c.cache.keep,
        "engine={c.engine.name} has no cache.bits or cache.codec (engine.* has its own formats), cache.beyond_context "
        "or keep: leave them out",
    ),
)


def check_engine(settings: Settings) -> None:
    """ConfigError for what the engine cannot be asked; neither weights nor the engine are loaded."""
    if settings.engine is None:
        return
    refuse(settings, (*driver_of(settings).refused, *REFUSED))
    check_family(config_of_spec(settings.model))
    generation = generation_config_of(settings.model)
    if (penalty := getattr(generation, "repetition_penalty", None)) not in (None, 1.0):
        raise ConfigError(
            f"the model's generation_config.json sets repetition_penalty={penalty}, which "
            f"engine={settings.engine.name} is not asked for: take another model, or leave out engine"
        )


def check_installed(settings: Settings) -> None:
    """ConfigError where the run's engine is not installed."""
    if settings.engine is not None:
        driver_of(settings).check_installed()


def engine_answer(
    settings: Settings, model: Model, tokenizer: Tokenizer, ids: Sequence[int], seed: int
) -> tuple[ModelOutput, NDArray[np.float32] | None]:
    """The answer of the run's engine to a prompt, and its logits [N, V] where the engine gives them.

    seed: of the noise of the run's method.
    """
    from kvexp.run.answers import ModelOutput

    decoding, engine = settings.decoding, driver_of(settings).engine(settings, model, seed)
    ends = eos_ids(model, decoding.eos)
    answer = engine.answer(ids, decoding.max_new_tokens, ends, decoding.min_new_tokens)
    stopped = answer.tokens[-1] in ends
    output = ModelOutput(
        tokenizer.decode(answer.tokens, skip_special_tokens=True),
        len(answer.tokens),
        vars(_receipt(engine, answer, len(ids))),
        {"ttft": answer.first_s, "tt2t": None, "tpot": answer.rest_s / max(1, len(answer.tokens) - 1)},
        finish_reason="stop" if stopped else "length",
        stop_reason=tokenizer.decode(answer.tokens[-1:]) if stopped else None,
        tokens=answer.tokens,
        info={"output_logprobs": answer.logprobs},
    )
    return output, answer.logits


def full_logits(model: Model, ids: Sequence[int], text: Sequence[int]) -> NDArray[np.float32]:
    """Logits [N, V] of transformers' full cache that predict each of the N tokens of a text behind a prompt."""
    import torch

    with torch.no_grad():
        whole = torch.tensor([[*ids, *text[:-1]]])
        logits: NDArray[np.float32] = model(whole, use_cache=False, logits_to_keep=len(text)).logits[0].numpy()
    return logits


class EngineText:
    """A text behind a prompt, both token ids, along which runs of an engine are compared with its full cache.

    full: the full cache's logits [N, V] that predict its tokens; None: they are computed by its run, `settings`.
    """

    def __init__(
        self,
        settings: Settings,
        model: Model,
        ids: Sequence[int],
        text: Sequence[int],
        full: NDArray[np.float32] | None,
    ) -> None:
        self.model, self.ids, self.text = model, ids, text
        self.full = self.logits(settings, 0) if full is None else full
        self.plain = full_logits(model, ids, text)
        self.engine_kl = kl_of(self.plain, self.full)

    def logits(self, settings: Settings, seed: int) -> NDArray[np.float32]:
        """Logits [N, V] of a run that predict the text's tokens; seed: of the noise of its method."""
        engine = cast("ForcedEngine", driver_of(settings).engine(settings, self.model, seed))
        return engine.logits(self.ids, self.text)

    def compared(self, settings: Settings, seed: int) -> tuple[KL, dict[str, Any]]:
        """The run's comparison with the full cache, and more of the text's line.

        first_by_prefill: whether the first token is predicted alike: nothing is evicted yet, and formats are the same.
        Per token: kl_transformers, KL(transformers' full cache || the run), and engine_kl, the same of the engine's
        full cache, which is what the engine itself costs.
        """
        import torch

        from kvexp.generate.kl import KL, compare

        logits = self.logits(settings, seed)
        rows = compare(torch.from_numpy(self.full), torch.from_numpy(logits), torch.tensor(self.text))
        kl, full_logprob, logprob, same = rows.tolist()
        row = KL(list(self.text), kl, full_logprob, logprob, [agrees > 0.5 for agrees in same])
        alike = bool(np.array_equal(self.full[0], logits[0]))
        more = {"kl_transformers": kl_of(self.plain, logits), "engine_kl": self.engine_kl}
        return row, {"first_by_prefill": alike, **more}


def _receipt(engine: Engine, answer: EngineAnswer, prompt: int) -> EvictionStats:
    """What the engine says of its cache; a slot is one of a block that is in use, which all layers have as many of."""
    first, slots = engine.first_eviction(prompt), float(answer.blocks * engine.block)
    return EvictionStats(
        slots=slots,
        slots_by_layer=[slots] * engine.layers,
        kv_bytes=answer.blocks * engine.block_bytes,
        peak_kv_bytes=answer.peak_blocks * engine.block_bytes,
        first_eviction_step=first if first is not None and first < len(answer.tokens) else None,
        kept_digest="",
        attention_kept=None,
        batch_size=1,
    )
