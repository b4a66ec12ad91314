"""The log of what a run evicted, one set of files per example in the run's folder; and what was held at a step.

    outputs/<hash>/diagnose/NAME.json                tokens of the example, and whether its row has the same
                            NAME.evictions.parquet   every eviction

NAME is made of the example's id. NAME.json is written last: an example without it has no diagnosis.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from kvexp.run.store import Run
from kvexp.util.errors import ConfigError
from kvexp.util.fields import Range, check_fields
from kvexp.util.files import explained, replace
from kvexp.util.strict_json import load

FOLDER = "diagnose"
EVICTIONS = "evictions.parquet"
Count = Annotated[int, Range(0, (1 << 31) - 1)]


@dataclass(frozen=True)
class ExampleLog:
    """NAME.json. ids, texts: of prompt, question and answer, in order of position; the texts joined are the whole text.

    heads: kv heads of each layer; same_output, same_kept: whether output and kept slots equal the row's.
    """

    example: str
    prompt_tokens: Count
    question_tokens: Count
    ids: list[Count]
    texts: list[str]
    heads: list[Count]
    same_output: bool
    same_kept: bool

    @property
    def new_tokens(self) -> int:
        return len(self.ids) - self.prompt_tokens - self.question_tokens

    @property
    def steps(self) -> int:
        """Decode tokens that were fed: the question's, and the answer's but for the last."""
        return max(self.question_tokens + self.new_tokens - 1, 0)

    @property
    def same(self) -> bool:
        return self.same_output and self.same_kept


def file_of(run: Run, example: str, ending: str) -> Path:
    """NAME.ending; the digest in NAME keeps apart what a file system may not (case, length)."""
    digest = hashlib.sha256(example.encode()).hexdigest()[:8]
    return run.path / FOLDER / f"{quote(example, safe='')[:80]}-{digest}.{ending}"


def write_file(run: Run, example: str, ending: str, data: bytes) -> None:
    """Write a file of an example, whole or not at all; an OSError says what failed."""
    file = file_of(run, example, ending)
    with explained(file):
        file.parent.mkdir(exist_ok=True)
        replace(file, data)


def write_example_log(run: Run, log: ExampleLog) -> None:
    write_file(run, log.example, "json", json.dumps(asdict(log)).encode())


def read_example_log(run: Run, example: str) -> ExampleLog | None:
    """The log of an example; None where it has no diagnosis yet."""
    file = file_of(run, example, "json")
    if not file.exists():
        return None
    try:
        fields = load(file)
        fields.pop("agrees", None)  # of logs with a twin, which kvexp wrote before 0.3
        log = ExampleLog(**fields)
        check_fields(log)
        if len(log.ids) != len(log.texts) or log.new_tokens < 0:
            raise ValueError("texts must be one for each of ids, of which prompt and question are a part")
        return log
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{file}: {error}; remove the file and run the same command again with diagnose=log"
        ) from error


def require_example_log(run: Run, example: str) -> ExampleLog:
    """The log of an example; ConfigError where it has none."""
    log = read_example_log(run, example)
    if log is None:
        raise ConfigError(
            f"{run.path} has no log of example {example}: run the same command again with diagnose=log (its rows stay "
            "as they are)"
        )
    return log


def write_evictions(run: Run, log: ExampleLog, columns: dict[str, Any]) -> None:
    """Write the evictions of an example, columns of one length; a column `text` is added to `position`."""
    arrays = {name: pa.array(values) for name, values in columns.items()}
    names = list(dict.fromkeys(log.texts))
    code = {name: place for place, name in enumerate(names)}
    by_position = [code[text] for text in log.texts]
    at = [by_position[position] for position in columns["position"]]
    arrays["text"] = pa.DictionaryArray.from_arrays(pa.array(at, pa.int32()), pa.array(names, pa.string()))
    floats = [name for name, array in arrays.items() if pa.types.is_floating(array.type) and name != "threshold"]
    sink = io.BytesIO()
    pq.write_table(
        pa.table(arrays),
        sink,
        compression="zstd",
        compression_level=9,
        use_dictionary=[name for name in arrays if name not in floats and name != "position"],
        column_encoding={"position": "DELTA_BINARY_PACKED"},
        use_byte_stream_split=floats,
    )
    write_file(run, log.example, EVICTIONS, sink.getvalue())


def read_evictions(run: Run, example: str) -> pd.DataFrame:
    """ConfigError where the example has none."""
    file = file_of(run, example, EVICTIONS)
    if not file.exists():
        raise ConfigError(
            f"{run.path} has no {file.name}: run the same command again with diagnose=log (its rows stay as they are)"
        )
    try:
        table: pd.DataFrame = pq.read_table(file).to_pandas()
        return table
    except (OSError, pa.ArrowException) as error:
        why = str(error).splitlines()[0]
        raise ConfigError(f"cannot read {file}: {why}; remove it and run the command again with diagnose") from error


def has_log(run: Run, example: str) -> bool:
    """Whether the log of the example is complete."""
    return read_example_log(run, example) is not None and file_of(run, example, EVICTIONS).exists()


# The tokens that are still there at a step: how many heads of each layer hold each of them.


Array = Any  # of numpy


@dataclass(frozen=True)
class View:
    """Tokens held once the evictions of `step` are done.

    kept: int32 [L, tokens], heads of each layer that hold each token, 0 for tokens to come; layer: None for all. The
    tokens are prompt, question and answer.
    """

    log: ExampleLog
    kept: Array
    step: int
    layer: int | None

    @property
    def counts(self) -> Array:
        """[tokens]: heads, of the layer or of all."""
        return self.kept.sum(0) if self.layer is None else self.kept[self.layer]

    @property
    def heads(self) -> int:
        """Heads that hold a token before any eviction."""
        return sum(self.log.heads) if self.layer is None else self.log.heads[self.layer]

    @property
    def present(self) -> int:
        """Tokens that have been read at this step."""
        return self.log.prompt_tokens + self.step


def view(run: Run, example: str, step: int = 0, layer: int | None = None) -> View:
    """Tokens held at a step; ConfigError where the example has no log, or not that many steps or layers."""
    return view_of(require_example_log(run, example), read_evictions(run, example), step, layer)


def view_of(log: ExampleLog, evictions: pd.DataFrame, step: int = 0, layer: int | None = None) -> View:
    """Tokens held at a step, by a log and its table of evictions that were read before."""
    if not 0 <= step <= log.steps:
        raise ConfigError(f"--step must be from 0 (the end of the prompt) to {log.steps} in this example, got {step}")
    if layer is not None and not 0 <= layer < len(log.heads):
        raise ConfigError(f"--layer must be from 0 to {len(log.heads) - 1} in this model, got {layer}")
    kept = np.zeros((len(log.heads), len(log.ids)), dtype=np.int32)
    kept[:, : log.prompt_tokens + step] = np.array(log.heads, dtype=np.int32)[:, None]
    try:
        places = evictions[evictions["step"] <= step][["layer", "position"]].to_numpy(dtype=np.int64)
        if ((places < 0) | (places >= kept.shape)).any():
            raise ValueError(f"a layer or position is outside of {kept.shape[0]} layers, {kept.shape[1]} tokens")
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the log of evictions of example {log.example} is damaged: step, layer and position must be numbers "
            f"({error}); remove it and run the same command again with diagnose=log"
        ) from error
    np.subtract.at(kept, tuple(places.T), 1)
    return View(log, kept, step, layer)
