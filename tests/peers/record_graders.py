"""Prompts of four benchmarks and verdicts of their graders, by their own code, for tests/tasks/test_graders.py.

`python tests/peers/record_graders.py FOLDER`, with clones in it: InfiniteBench (github.com/OpenBMB/InfiniteBench at
88b3daa, MIT), MInference (github.com/microsoft/MInference at fb56c91, MIT), babilong (github.com/booydar/babilong at
7a6efee, Apache-2.0), LongBench (github.com/THUDM/LongBench at 2e00731, MIT). Writes tests/fixtures/graders.json. ROUGE
is left out: theirs is a package's. The grader of longdialogue_qa_eng is MInference's copy, which has InfiniteBench's
correction of August 2024.
"""

from __future__ import annotations

import ast
import json
import re
import runpy
import string
import sys
from collections import Counter
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parents[1] / "fixtures" / "graders.json"
ROOMS = ["bathroom", "bedroom", "garden", "hallway", "kitchen", "office"]
ANSWERS: dict[str, list[tuple[str, Any]]] = {
    "passkey": [
        *((said, ["71432"]) for said in ("71432", " 71432.", "The key is 71432", "7143", "714321", "", "no", "1 71432"))
    ],
    "kv_retrieval": [
        *((said, "ab-12") for said in ("ab-12", '"ab-12"', "It is: ab-12.", "ab-123", "xab-12", "AB-12", "", "{ab-12}"))
    ],
    "longdialogue_qa_eng": [
        *((said, ["MARY"]) for said in ("Mary", "mary.", "Mary-Ann", '"MARY":', "John or Mary", "")),
        *((said, ["ECKER", "COMMANDER BILL ECKER"]) for said in ("Ecker", "Commander Bill Ecker", "Commander Bill")),
        *((said, ["STAMP PAID"]) for said in ("Stamp Paid.", "STAMP", "paid stamp", "It is STAMP PAID")),
    ],
    "code_run": [*((said, [-7]) for said in ("-7", "is -7.", "7", "-7 of", "`-7`", "", "-7\n", "3 then -7"))],
    "code_debug": [
        *(
            (said, ["load", "B"])
            for said in (
                *(
                    "B.",
                    "B: load",
                    "B",
                    "answer is: B",
                    "The answer is: load.",
                    "answer is:",
                    "Option B",
                    "answer is: A",
                ),
                *("The correct option is: B. load", "A. x answer is: B", "error is: load", "", "answer: load"),
            )
        )
    ],
    "longbook_choice_eng": [
        *(
            (said, ["He left", "C"])
            for said in (
                *(
                    "C",
                    "C. He left",
                    "A",
                    "He left",
                    "The answer is C",
                    "answer: C",
                    "The answer is: C.",
                    "option is C",
                ),
                *(
                    "I think it is C",
                    "I think it is B or C",
                    "the answer is",
                    "",
                    "maybe D",
                    "Because C",
                    "answer is He left",
                ),
            )
        )
    ],
    "math_find": [  # "12.0" is an error there where the answer is an integer; SCBench mended that
        *((said, [12]) for said in ("12", "is 12", "13 12", "-12", "", "no")),
        *((said, [1.5]) for said in ("1.5", "1.50", "15", "x 1.5 y", "2 1.5")),
    ],
    "math_calc": [*((said, [[3, 7, 2]]) for said in ("[3, 7, 2]", "3 7 3", "7", "3", "", "3, 7, 2, 9", "-3 7 2"))],
    "longbook_qa_eng": [
        *(
            (said, ["The red house", "a hut"])
            for said in ("red house", "A hut!", "the house", "nothing", "", "hut, red")
        )
    ],
    "longbook_qa_chn": [
        *((said, ["红色的房子", "小屋"]) for said in ("红色的房子", "房子。", "小 屋", "没有", "", "红，小屋"))  # noqa: RUF001
    ],
    "scbench_kv": [*((said, "ab-12") for said in ("ab-12", "xab-123", "AB-12", ""))],
    "scbench_vt": [*((said, ["ABC", "DEF", "GHI"]) for said in ("abc def ghi", "ABC", "ABCDEF", "", "no"))],
    "scbench_qa_eng": [*((said, ["Mary", "Ann"]) for said in ("mary", "It was ann.", "Joanna", "Bob", ""))],
    "scbench_mf": [*((said, 12) for said in ("12", "12.7", "no", "13 12"))],
}


OPTIONS = ["Ann", "Bob", "Cid", "Dan"]
NAMES = ("passkey", "number_string", "kv_retrieval", "longbook_sum_eng", "longbook_choice_eng", "longbook_qa_eng")
MORE = ("longbook_qa_chn", "longdialogue_qa_eng", "math_find", "math_calc", "code_run", "code_debug")
INPUTS = {"math_find": "The largest number of the list is", "code_run": "What is func_3(-4)?"}
TURNS = [
    {"input": "Who left?", "answer": "Ann", "options": OPTIONS},
    {"input": "Who came?", "answer": "Dan", "options": OPTIONS},
]
NUMBERS = [{"input": "The largest number is", "answer": 9}, {"input": "The Median is", "answer": 4}]


def prompts(folder: Path) -> list[dict[str, Any]]:
    """Rows, and what the scripts make of them: the prompt, or text and questions, or the first message and others."""
    made = []
    templates = functions(folder / "InfiniteBench/src/prompt.py")["yarn_mistral_templates"]
    infinite = functions(folder / "InfiniteBench/src/eval_utils.py", Path=Path)
    infinite["MODEL_TO_PROMPT_TEMPLATE"] = {"any": templates}
    for name in (*NAMES, *MORE):
        row = {"context": "A {book}.", "input": INPUTS.get(name, "Who left?"), "answer": ["Bob"], "options": OPTIONS}
        made.append({"task": name, "row": row, "prompt": infinite["create_prompt"](dict(row), name, "any", ".")})
    shared = functions(folder / "MInference/scbench/eval_utils.py", Path=Path)
    for name in ("kv", "prefix_suffix", "vt", "qa_eng", "qa_chn", "choice_eng", "many_shot", "mf", "summary"):
        name = f"scbench_{name}"
        row = {"id": 0, "context": "A book.", "multi_turns": NUMBERS if name == "scbench_mf" else TURNS}
        apart = shared["create_scdq_prompt"](row, name, None, False)["prompts"]
        one = {"task": name, "row": row, "apart": apart}
        if name != "scbench_summary":  # which its function for conversations leaves out
            first, *_ = shared["create_multiturn_prompt"](row, name, None, False)["prompts"]
            _, *others = shared["create_multiturn_prompt"](row, name, None, False, disable_golden_context=True)[
                "prompts"
            ]
            one["turns"] = [first, *others]
        made.append(one)
    row = {"context": " A book. ", "question": "Who left?", "answer": "B"}
    row |= {f"choice_{letter}": name for letter, name in zip("ABCD", OPTIONS, strict=True)}
    template = (folder / "LongBench/prompts/0shot.txt").read_text()
    for mark, field in (
        ("DOC", "context"),
        ("Q", "question"),
        *((f"C_{letter}", f"choice_{letter}") for letter in "ABCD"),
    ):
        template = template.replace(f"${mark}$", row[field].strip())
    made.append({"task": "longbench_v2", "row": row, "prompt": template})
    facts = runpy.run_path(str(folder / "babilong/babilong/prompts.py"))
    for name in ("qa1", "qa2", "qa3", "qa6", "qa7"):
        row = {"input": " A book. ", "question": "Where?", "target": "yes"}
        parts = facts["DEFAULT_PROMPTS"][name]
        words = facts["get_formatted_input"](row["input"], row["question"], **parts)
        made.append({"task": name, "row": row, "prompt": words})
    return made


def functions(path: Path, **given: Any) -> dict[str, Any]:
    """The functions and tables of a script, without running the rest of it."""
    tree = ast.parse(path.read_text())
    kept = [one for one in tree.body if isinstance(one, ast.FunctionDef | ast.Assign | ast.ImportFrom)]
    kept = [one for one in kept if isinstance(one, ast.FunctionDef) or "__future__" in ast.dump(one) or _plain(one)]
    space: dict[str, Any] = {"re": re, "string": string, "Counter": Counter, "json": json, **given}
    exec(compile(ast.Module(kept, []), str(path), "exec"), space)
    return space


def _plain(one: ast.stmt) -> bool:
    return isinstance(one, ast.Assign) and not any(
        isinstance(each, ast.Call | ast.Name) for each in ast.walk(one.value)
    )


def main() -> None:
    folder = Path(sys.argv[1])
    infinite = functions(folder / "InfiniteBench/src/compute_scores.py", tqdm=iter)
    shared = functions(folder / "MInference/scbench/compute_scores.py", tqdm=iter, Path=Path)
    facts = functions(folder / "babilong/babilong/metrics.py")
    letters = functions(folder / "LongBench/pred.py")
    made: dict[str, list[Any]] = {}
    for name, cases in ANSWERS.items():
        space = shared if name.startswith(("scbench", "longdialogue")) else infinite
        task = shared["Multiturnbench_to_Infinitebench"].get(name, name) if space is shared else name
        made[name] = [[said, right, space["get_score_one"](said, right, task, "any")] for said, right in cases]
    outputs = (
        *(
            "The most recent location of Mary is kitchen.",
            "kitchen",
            "Kitchen. Not the garden.",
            "kitchen or garden",
            "",
        ),
        *("the bedroom", "kitchen<example> garden", "The kitchen, not the office", "in the kitchens", "I do not know"),
    )
    for asked in ("Where is Mary?", "Where was the apple before the office?"):
        made.setdefault("facts", []).extend(
            [said, ["kitchen", asked, ROOMS], facts["compare_answers"]("kitchen", said, asked, ROOMS)]
            for said in outputs
        )
    numbers = ["none", "one", "three", "two"]
    for said, right in (
        ("two", "two"),
        ("none", "none"),
        ("one", "one"),
        ("Two objects", "two"),
        ("one or two", "two"),
    ):
        given = "How many objects is John carrying?"
        made["facts"].append([said, [right, given, numbers], facts["compare_answers"](right, said, given, numbers)])
    sentences = ("The correct answer is (B).", "**The correct answer is B**", "The correct answer is (b)", "B", "")
    more = (
        "the correct answer is (B)",
        "The correct answer is (E). The correct answer is C",
        "The correct answer is Bob",
    )
    made["longbench_v2"] = [[said, "B", letters["extract_answer"](said)] for said in (*sentences, *more)]
    made["prompts"] = prompts(folder)
    OUT.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")
    print({name: len(cases) for name, cases in made.items()})


if __name__ == "__main__":
    main()
