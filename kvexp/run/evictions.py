"""The log of what a run evicted, beside its rows, one set of files per example; and what was held at a step.

    outputs/<hash>/diagnose/NAME.json                tokens of the example, and whether they are those of its row
                            NAME.evictions.parquet   every eviction
                            NAME.twin.parquet        what it did to attention, per step, layer and head

NAME is made of the example's id. NAME.json is written last: an example without it has no diagnosis.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from kvexp.run.store import Run
from kvexp.util import ConfigError, explained, load, replace

FOLDER = "diagnose"
EVICTIONS, TWIN = "evictions.parquet", "twin.parquet"


@dataclass(frozen=True)
class ExampleLog:
    """NAME.json. ids, texts: of prompt, question and answer, in order of position; the texts joined are the whole text.

    heads: kv heads of each layer; same_output, same_kept: whether output and kept slots are those of the row. agrees:
    for each token of the answer whether the full cache, fed the same tokens before it, would have written it too (twin
    runs only).
    """

    example: str
    prompt_tokens: int
    question_tokens: int
    ids: list[int]
    texts: list[str]
    heads: list[int]
    same_output: bool
    same_kept: bool
    agrees: list[bool] | None = None

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


def stem(run: Run, example: str) -> Path:
    """NAME, with its folder; the digest keeps apart what a file system may not (case, length)."""
    digest = hashlib.sha256(example.encode()).hexdigest()[:8]
    return run.path / FOLDER / f"{quote(example, safe='')[:80]}-{digest}"


def write_example_log(run: Run, told: ExampleLog) -> None:
    _write(_file(run, told.example, "json"), json.dumps(asdict(told)).encode())


def read_example_log(run: Run, example: str) -> ExampleLog | None:
    """None where the example has no diagnosis yet."""
    file = _file(run, example, "json")
    if not file.exists():
        return None
    try:
        return _checked(ExampleLog(**load(file)))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{file}: {error}; remove the file and run the same command again with diagnose=log"
        ) from error


def _checked(told: ExampleLog) -> ExampleLog:
    """ValueError for a field that does not hold what `ExampleLog` says."""
    numbers = (told.prompt_tokens, told.question_tokens, *_listed(told.ids), *_listed(told.heads))
    if not all(isinstance(number, int) and 0 <= number < 1 << 31 for number in numbers):
        raise ValueError("prompt_tokens, question_tokens, ids and heads must be whole numbers from 0")
    if len(told.ids) != len(_listed(told.texts)) or not all(isinstance(text, str) for text in told.texts):
        raise ValueError("texts must be a list of texts, one for each of ids")
    if not isinstance(told.example, str) or told.new_tokens < 0:
        raise ValueError("example must be a text, and ids at least those of prompt and question")
    return told


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"ids, texts and heads must be lists, got {value!r:.60}")
    return value


def require_example_log(run: Run, example: str) -> ExampleLog:
    told = read_example_log(run, example)
    if told is None:
        raise ConfigError(
            f"{run.path} has no log of example {example}: run the same command again with diagnose=log (its rows stay "
            "as they are)"
        )
    return told


def write_table(run: Run, example: str, ending: str, columns: dict[str, Any], texts: list[str] | None = None) -> None:
    """Columns of one length; texts: of the tokens by position, for a column `text` beside `position`."""
    arrays = {name: pa.array(values) for name, values in columns.items()}
    if texts is not None:
        names = list(dict.fromkeys(texts))
        code = {name: place for place, name in enumerate(names)}
        by_position = [code[text] for text in texts]
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
        column_encoding={"position": "DELTA_BINARY_PACKED"} if "position" in arrays else None,
        use_byte_stream_split=floats,
    )
    _write(_file(run, example, ending), sink.getvalue())


def read_table(run: Run, example: str, ending: str) -> pd.DataFrame:
    """ConfigError where the example has none."""
    file = _file(run, example, ending)
    if not file.exists():
        wanted = "twin" if ending == TWIN else "log"
        raise ConfigError(
            f"{run.path} has no {file.name}: run the same command again with diagnose={wanted} (its rows stay as they "
            "are)"
        )
    try:
        table: pd.DataFrame = pq.read_table(file).to_pandas()
        return table
    except (OSError, pa.ArrowException) as error:
        why = str(error).splitlines()[0]
        raise ConfigError(f"cannot read {file}: {why}; remove it and run the command again with diagnose") from error


def has(run: Run, example: str, ending: str) -> bool:
    """Whether this part of the example's diagnosis is complete."""
    return read_example_log(run, example) is not None and _file(run, example, ending).exists()


def _file(run: Run, example: str, ending: str) -> Path:
    start = stem(run, example)
    return start.with_name(f"{start.name}.{ending}")


def _write(file: Path, data: bytes) -> None:
    with explained(file):
        file.parent.mkdir(exist_ok=True)
        replace(file, data)


# What is still there at a step: for every token of an example, how many heads of each layer hold it.


Array = Any  # of numpy


@dataclass(frozen=True)
class View:
    """kept [L, tokens]: heads that hold the token once the evictions of `step` are done; a token to come has 0.

    layer: None for all. The text is that of prompt, question and answer.
    """

    told: ExampleLog
    kept: Array
    step: int
    layer: int | None

    @property
    def counts(self) -> Array:
        """[tokens]: heads, of the layer or of all."""
        return self.kept.sum(0) if self.layer is None else self.kept[self.layer]

    @property
    def heads(self) -> int:
        """What a token has that nobody has evicted."""
        return sum(self.told.heads) if self.layer is None else self.told.heads[self.layer]

    @property
    def present(self) -> int:
        """Tokens that have been read at this step."""
        return self.told.prompt_tokens + self.step

    def data(self) -> dict[str, Any]:
        """Plain values for a page: one entry per token, `kept` and `by_layer` None for tokens to come."""
        tokens = [
            {
                "text": text,
                "kept": int(self.counts[place]) if place < self.present else None,
                "by_layer": self.kept[:, place].tolist() if place < self.present else None,
            }
            for place, text in enumerate(self.told.texts)
        ]
        told = self.told
        return {
            "example": told.example,
            "step": self.step,
            "layer": self.layer,
            "heads": self.heads,
            "heads_by_layer": told.heads,
            "prompt_tokens": told.prompt_tokens,
            "question_tokens": told.question_tokens,
            "tokens": tokens,
        }


def view(run: Run, example: str, step: int = 0, layer: int | None = None) -> View:
    """ConfigError where the example has no log, or not that many steps or layers."""
    told = require_example_log(run, example)
    return made(told, read_table(run, example, EVICTIONS), step, layer)


def made(told: ExampleLog, evictions: pd.DataFrame, step: int = 0, layer: int | None = None) -> View:
    """`view` of what was read."""
    if not 0 <= step <= told.steps:
        raise ConfigError(f"--step must be from 0 (the end of the prompt) to {told.steps} in this example, got {step}")
    if layer is not None and not 0 <= layer < len(told.heads):
        raise ConfigError(f"--layer must be from 0 to {len(told.heads) - 1} in this model, got {layer}")
    return View(told, kept_at(told, evictions, step), step, layer)


def kept_at(told: ExampleLog, evictions: pd.DataFrame, step: int) -> Array:
    """[L, tokens] int32: heads of each layer that hold each token after this step."""
    kept = np.zeros((len(told.heads), len(told.ids)), dtype=np.int32)
    kept[:, : told.prompt_tokens + step] = np.array(told.heads, dtype=np.int32)[:, None]
    try:
        gone = evictions[evictions["step"] <= step]
        places = gone[["layer", "position"]].to_numpy(dtype=np.int64)
    except (KeyError, TypeError, ValueError) as error:
        raise _not_this(told, f"it needs numbers in step, layer and position ({error})") from error
    if ((places < 0) | (places >= kept.shape)).any():
        raise _not_this(
            told, f"it names a layer or a position outside of {kept.shape[0]} layers, {kept.shape[1]} tokens"
        )
    np.subtract.at(kept, tuple(places.T), 1)
    return kept


def _not_this(told: ExampleLog, why: str) -> ConfigError:
    return ConfigError(
        f"the log of evictions of example {told.example} is damaged: {why}; remove it and run the same command again "
        "with diagnose=log"
    )
