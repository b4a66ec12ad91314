"""Rows as RULER's own scripts make them, for tests/tasks/test_long_tasks.py: `record_ruler.py FOLDER`.

FOLDER: scripts/data/synthetic of github.com/NVIDIA/RULER (Apache-2.0), read at commit c3f5e3b. Writes
tests/fixtures/ruler.json: the words, texts and documents given, and per row the seed, the units and the row. What the
scripts import is replaced: the word lists by those given, nltk's sentences by a split at . ! ? and a blank, and what
only a search for a length needs by nothing.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

OUT = Path(__file__).resolve().parents[1] / "fixtures" / "ruler.json"
SEED = 42  # of the orders that are the same in every row
WORDS = {
    "adjective": ["amber", "bitter", "calm", "damp", "eager", "faint", "gentle", "hollow"],
    "noun": [
        "anchor",
        "barrel",
        "candle",
        "dagger",
        "easel",
        "falcon",
        "garden",
        "hammer",
        "island",
        "jacket",
        "kettle",
        "ladder",
        "market",
        "needle",
        "orchard",
        "parcel",
        "quarry",
        "ribbon",
        "saddle",
        "timber",
        "umbrella",
    ],
    "verb": [
        "arrive",
        "borrow",
        "climb",
        "drift",
        "enter",
        "follow",
        "gather",
        "hurry",
        "imagine",
        "juggle",
        "knit",
        "listen",
        "mend",
        "nod",
        "offer",
    ],
}
ESSAY = (
    "The ferry left before the fog did. Nobody on the pier had asked why! Two crates of lamps stood in the rain, and a "
    'dog slept between them. "Whose are these?" said the porter. He wrote a number on each lid. By noon the fog had '
    "gone, and so had the crates. Was it the captain? The harbour book has no line about it."
)
SQUAD = {
    "data": [
        {
            "title": f"Town {town}",
            "paragraphs": [
                {
                    "context": f"Town {town} has bridge {bridge}, built of {town + bridge} stones.",
                    "qas": [
                        {
                            "question": f"Of what is bridge {bridge} of town {town} built?",
                            "is_impossible": bridge == 2,
                            "answers": [{"text": f"{town + bridge} stones"}, {"text": "stones"}],
                        }
                    ],
                }
                for bridge in range(3)
            ],
        }
        for town in range(4)
    ]
}
HOTPOT = [
    {
        "question": f"Who owns lamp {lamp}?",
        "answer": f"Owner {lamp}",
        "context": [[f"Lamp {each}", [f"Lamp {each} is old.", f" Owner {each} has it."]] for each in (lamp, lamp + 3)],
    }
    for lamp in range(5)
]
NIAH = {
    "niah_single_1": "noise words numbers 1 1 1",
    "niah_single_2": "essay words numbers 1 1 1",
    "niah_single_3": "essay words uuids 1 1 1",
    "niah_multikey_1": "essay words numbers 4 1 1",
    "niah_multikey_2": "needle words numbers 1 1 1",
    "niah_multikey_3": "needle uuids uuids 1 1 1",
    "niah_multivalue": "essay words numbers 1 4 1",
    "niah_multiquery": "essay words numbers 1 1 4",
}


def stand_ins() -> None:
    """Put modules in place that the scripts import, and have no say in what a row is."""
    made: dict[str, ModuleType] = {
        name: ModuleType(name) for name in ("tokenizer", "manifest_utils", "nltk", "nltk.tokenize", "tqdm")
    }
    made["tokenizer"].select_tokenizer = lambda kind, path: None  # type: ignore[attr-defined]
    made["manifest_utils"].write_manifest = None  # type: ignore[attr-defined]
    made["tqdm"].tqdm = iter  # type: ignore[attr-defined]
    made["nltk.tokenize"].sent_tokenize = lambda text: re.sub(  # type: ignore[attr-defined]
        r'([.!?]"?) ', r"\1\n", text
    ).split("\n")
    words = ModuleType("wonderwords")
    words.random_word = ModuleType("wonderwords.random_word")  # type: ignore[attr-defined]
    words.random_word._get_words_from_text_file = lambda name: WORDS[  # type: ignore[attr-defined]
        name.removesuffix("list.txt")
    ]
    sys.modules.update(made, wonderwords=words)


def script(folder: Path, name: str, template: str, length: int, *more: str) -> Any:
    """The script as a module, read with these arguments, and seeds set by them."""
    given = ["--save_dir=.", "--save_name=x", "--tokenizer_path=x", "--num_samples=1", "--tokens_to_generate=50"]
    sys.argv = [name, *given, f"--max_seq_length={length}", f"--random_seed={SEED}", f"--template={template}", *more]
    module = ModuleType(name)
    module.__file__ = str(folder / f"{name}.py")
    exec(compile((folder / f"{name}.py").read_text(), module.__file__, "exec"), vars(module))
    return module


def rows(folder: Path) -> list[dict[str, Any]]:
    sys.path.insert(0, str(folder))
    from constants import TASKS

    def template(kind: str) -> str:
        return str(TASKS[kind]["template"] + TASKS[kind]["answer_prefix"])

    made = []

    def keep(subset: str, seed: int, units: int, length: int, prompt: str, answers: list[str]) -> None:
        made.append(
            {"subset": subset, "seed": seed, "units": units, "length": length, "prompt": prompt, "answers": answers}
        )

    def seeded(seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)

    for subset, values in NIAH.items():
        names = ("type_haystack", "type_needle_k", "type_needle_v", "num_needle_k", "num_needle_v", "num_needle_q")
        options = [f"--{name}={value}" for name, value in zip(names, values.split(), strict=True)]
        niah = script(folder, "niah", template("niah"), 4096, *options)
        for seed, units in ((1, 9), (2, 150 if "essay" in values else 23)):
            seeded(seed)
            keep(subset, seed, units, 4096, *niah.generate_input_output(units))
    vt = script(folder, "variable_tracking", template("variable_tracking"), 4096)
    vt.TASKS = TASKS  # the script names what it does not import
    for seed, units in ((3, 6), (4, 17)):
        seeded(SEED)
        text, answers = vt.generate_input_output(5, 1, 4, is_icl=True)
        example = text + " " + " ".join(answers) + "\n"
        seeded(seed)
        text, answers = vt.generate_input_output(units, 1, 4)
        keep("vt", seed, units, 4096, vt.randomize_icl(example) + "\n" + text, answers)
    for length, units, seed in ((1024, 25, 5), (4096, 30, 6), (1024, 60, 7)):
        cwe = script(folder, "common_words_extraction", template("common_words_extraction"), length)
        if units > 50:  # more than there are words: the second list
            cwe.randle_words = niah.words
        seeded(seed)
        keep("cwe", seed, units, length, *cwe.generate_input_output(units))
    fwe = script(folder, "freq_words_extraction", template("freq_words_extraction"), 1024)
    fwe.TOKENIZER = type("Any", (), {"text_to_tokens": lambda self, text: []})()
    for seed, units in ((8, 90), (9, 301)):
        seeded(seed)
        text, answers, _ = fwe.generate_input_output(1000, num_words=units, vocab_size=(1024 - 50) // 50)
        keep("fwe", seed, units, 1024, text, answers)
    for subset, data in (("qa_1", "squad"), ("qa_2", "hotpotqa")):
        qa = script(folder, "qa", template("qa"), 4096, f"--dataset={data}")
        for number, units in ((0, 2), (3, 3), (4, 7), (1, 30)):
            seeded(number)
            keep(subset, number, units, 4096, *qa.generate_input_output(number, units))
    return made


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for file in Path(sys.argv[1]).glob("*.py"):
            (folder / file.name).write_text(file.read_text())
        (folder / "json").mkdir()
        for name, value in (
            ("PaulGrahamEssays", {"text": ESSAY}),
            ("english_words", {}),
            ("squad", SQUAD),
            ("hotpotqa", HOTPOT),
        ):
            (folder / "json" / f"{name}.json").write_text(json.dumps(value))
        stand_ins()
        made = rows(folder)
    given = {"words": WORDS, "essay": ESSAY, "squad": SQUAD, "hotpot": HOTPOT}
    source = "github.com/NVIDIA/RULER, commit c3f5e3b, scripts/data/synthetic (Apache-2.0); tests/peers/record_ruler.py"
    OUT.write_text(json.dumps({"source": source, "given": given, "rows": made}, indent=1) + "\n")
    print(f"{len(made)} rows in {OUT}")


if __name__ == "__main__":
    main()
