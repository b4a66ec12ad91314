"""LongBench: official prompts to the letter, its cut and its chat frame, and every way its data comes today."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import sys
import tracemalloc
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from commands import composed
from conftest import SHARED

from kvexp.hf.load import byte_tokenizer
from kvexp.results.table import table
from kvexp.results.views import FOURTEEN, averages, main
from kvexp.run.prompts import continuation, tokenize, with_stop_tokens
from kvexp.run.settings import settings_of
from kvexp.run.store import Run
from kvexp.tasks import LongBench
from kvexp.tasks import data as archive
from kvexp.tasks.longbench import (
    SUBSETS,
    check_jieba,
    classification,
    code_similarity,
    count,
    qa_f1,
    qa_f1_zh,
    retrieval,
    rouge_l,
    rouge_l_zh,
    score,
)
from kvexp.tasks.metrics import contains, exact_match, normalise, word_recall
from kvexp.util.errors import ConfigError

FOLDER = Path(__file__).parents[1] / "fixtures" / "longbench"
QASPER = LongBench(subset="qasper", data_files=str(FOLDER))
BYTES = byte_tokenizer()

# sha256 of the prompts in config/dataset2prompt.json of github.com/THUDM/LongBench
PROMPTS = {
    **{"narrativeqa": "aada7ed24b06", "qasper": "0fbdd123fe7f", "multifieldqa_en": "20b4666a2de8"},
    **{"hotpotqa": "9ec4ae308865", "2wikimqa": "9ec4ae308865", "musique": "9ec4ae308865"},
    **{"gov_report": "91c25d585b18", "qmsum": "dca23b678fe0", "multi_news": "2af3f28c40b9"},
    **{"trec": "0eff8bebdba9", "triviaqa": "00a802e6377e", "samsum": "a68d88423490"},
    **{"passage_count": "986550b6c610", "passage_retrieval_en": "39b96b7fa52b"},
    **{"lcc": "6a1f24cf0bb8", "repobench-p": "ee9ec182ea5f", "multifieldqa_zh": "344b3a4e557c"},
    **{"dureader": "ae53329f51b1", "vcsum": "3e5d8241bc9b", "lsht": "f3edabdf7fae"},
    **{"passage_retrieval_zh": "c1e2346e245e"},
}
LENGTHS = {
    **dict.fromkeys(("narrativeqa", "qasper", "samsum", "dureader"), 128),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "vcsum"), 512),
    **dict.fromkeys(("multifieldqa_en", "multifieldqa_zh", "trec", "lsht", "lcc", "repobench-p"), 64),
}
PLAIN = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}


def test_official_prompts_lengths_and_treatment():
    assert {name: hashlib.sha256(s.prompt.encode()).hexdigest()[:12] for name, s in SUBSETS.items()} == PROMPTS
    for name, subset in SUBSETS.items():
        assert subset.new_tokens == LENGTHS.get(name, 32), name
        assert subset.chat == (name not in PLAIN), name
        assert subset.first_line == (name in {"trec", "triviaqa", "samsum", "lsht"}), name
    assert set(FOURTEEN) < set(SUBSETS)
    assert sum(subset.extended for subset in SUBSETS.values()) == 13


def test_a_prompt():
    first, _, third = QASPER.examples()
    assert first.prefix == SUBSETS["qasper"].prompt.split("{context}")[0]
    assert first.body == "We ringed 212 herons over two summers."
    assert first.suffix.startswith("\n\n Answer the question based on the above article")
    assert first.suffix.endswith("\n\nQuestion: How many herons were ringed?\n\nAnswer:")
    assert (first.id, first.reference) == ("qasper-0", "212")
    assert first.info == {"answers": ["212", "212 herons"], "all_classes": None, "length": 7}
    assert "{about} money" in third.prompt  # braces in a context are text
    later = next(replace(QASPER, question="after_eviction").examples())
    assert later.prompt + later.question == first.prompt and later.question == first.suffix


def test_a_prompt_with_code_and_one_in_chinese():
    first = next(LongBench(subset="repobench-p", data_files=str(FOLDER)).examples())
    assert first.prompt == (
        "Please complete the code given below. \ndef f(n):\n    return n\ndef g():\n    x = f(1)\nNext line of code:\n"
    )
    chinese = next(LongBench(subset="passage_retrieval_zh", data_files=str(FOLDER)).examples())
    assert chinese.prompt.endswith('答案格式必须是"段落1"，"段落2"等格式\n\n答案是：')  # noqa: RUF001


def test_options_of_a_subset():
    assert (QASPER.max_new_tokens, QASPER.min_new_tokens, QASPER.extra_end_texts) == (128, 0, ())
    samsum = LongBench(subset="samsum")
    assert (samsum.max_new_tokens, samsum.min_new_tokens, samsum.extra_end_texts) == (128, 1, ("\n",))
    assert LongBench(subset="samsum", max_new_tokens=5).max_new_tokens == 5
    assert QASPER.label("longbench") == "longbench/qasper"
    assert LongBench(subset="qasper", extended=True).label("lb") == "lb/qasper_e"


def test_scores():
    first = next(QASPER.examples())
    assert QASPER.score("212 herons!", "212", first) == {"score": 100.0}  # the best reference
    assert QASPER.score("herons", "212", first)["score"] == pytest.approx(200 / 3)
    trec = LongBench(subset="trec", data_files=str(FOLDER))
    example = next(trec.examples())
    assert trec.score("\n\nDate\nFood", "Date", example) == {"score": 100.0}  # line ends in front go, the rest is cut
    assert trec.score("Date Food", "Date", example) == {"score": 50.0}
    assert QASPER.score("\n212\nFood", "212", first)["score"] == pytest.approx(200 / 3)  # no cut here


# ---- the cut


def test_halves_of_a_prompt_too_long():
    """LongBench's pred.py: int(max / 2) tokens from both ends of the whole prompt, start token included."""
    task = LongBench(subset="lcc", max_prompt_tokens=11)
    example = replace(next(QASPER.examples()), prompt="abcdefghijklmnopqrstuvwxyz", prefix="", suffix="", body="")
    example = replace(example, body=example.prompt)
    cut = tokenize(example, task, BYTES, 999, chat=False)
    assert cut.text == "abcd" + "vwxyz"  # <s>abcd and vwxyz, decoded without <s>
    assert cut.ids == BYTES("abcdvwxyz").input_ids and cut.truncated and cut.tokens == 27
    whole = tokenize(example, replace(task, max_prompt_tokens=27), BYTES, 27, chat=False)
    assert (whole.text, whole.truncated, whole.size) == (example.prompt, False, 27)
    # what the model holds cuts too, likewise in the middle
    room = tokenize(example, replace(task, max_prompt_tokens=None), BYTES, 12, chat=False)
    assert (room.text, room.size) == ("abcde" + "uvwxyz", 12)
    assert tokenize(example, replace(task, max_prompt_tokens=1), BYTES, 99, chat=False).skipped == "too long"


def test_the_frame_goes_around_what_is_left():
    """The maximum counts the words alone; the frame, tokenised with a start token of its own, comes on top."""
    task = LongBench(subset="qasper", max_prompt_tokens=11, chat_frame="[INST]{prompt}[/INST]")
    example = replace(next(QASPER.examples()), prompt="abcdefghijklm", prefix="", suffix="", body="abcdefghijklm")
    cut = tokenize(example, task, BYTES, 99, chat=True)
    assert cut.text == "[INST]abcdijklm[/INST]" and cut.ids == BYTES(cut.text).input_ids
    assert cut.size == 1 + 6 + 9 + 7 > 11
    assert tokenize(example, task, BYTES, 20, chat=True).text == "[INST]abklm[/INST]"  # no more room than that
    assert tokenize(example, task, BYTES, 99, chat=False).text == "abcdijklm"  # a base model has no frame
    plain = replace(task, subset="trec", max_new_tokens=None)
    assert tokenize(example, plain, BYTES, 99, chat=True).text == "abcdijklm"  # few-shot lessons have none either
    assert tokenize(example, replace(plain, chat_wrap="always"), BYTES, 99, chat=True).text.startswith("[INST]")
    assert tokenize(example, replace(task, chat_wrap="never"), BYTES, 99, chat=True).text == "abcdijklm"


def test_a_question_after_the_eviction_keeps_the_frames_end():
    task = replace(QASPER, question="after_eviction", chat_frame="[INST]{prompt}[/INST]")
    prompt = tokenize(next(task.examples()), task, BYTES, 9999, chat=True)
    assert prompt.text.startswith("[INST]You are") and prompt.text.endswith("two summers.")
    assert prompt.question_text.endswith("\n\nAnswer:[/INST]")
    assert prompt.ids + prompt.question_ids == BYTES(prompt.text + prompt.question_text).input_ids
    assert continuation(prompt, BYTES, chat=True, words=" 212") == BYTES(" 212", add_special_tokens=False).input_ids


def test_a_templates_start_token_is_the_only_one():
    class Chat:
        chat_template = "yes"

        def __call__(self, text, add_special_tokens=True, verbose=True):
            return BYTES(text, add_special_tokens=add_special_tokens)

        def apply_chat_template(self, messages, tokenize, add_generation_prompt, **_):
            return f"<s>[INST] {messages[0]['content']} [/INST]"

    example = next(QASPER.examples())
    wrapped = tokenize(example, QASPER, Chat(), 9999, chat=True)
    assert wrapped.ids.count(BYTES.bos_token_id) == 1 and wrapped.text.startswith("<s>[INST] You")
    trec = LongBench(subset="trec", data_files=str(FOLDER))
    plain = tokenize(next(trec.examples()), trec, Chat(), 9999, chat=True)
    assert plain.ids[0] == BYTES.bos_token_id and plain.text == next(trec.examples()).prompt


def test_a_line_end_ends_an_answer_of_samsum():
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[7, 9]), config=None)
    file = f"task.data_files={FOLDER}/qasper.jsonl"
    samsum = settings_of(*composed("task=longbench", "task.subset=samsum", file))
    assert (samsum.decoding.eos, samsum.decoding.min_new_tokens, samsum.decoding.max_new_tokens) == ("model", 1, 128)
    (line_end,) = BYTES("\n", add_special_tokens=False).input_ids
    assert with_stop_tokens(samsum, model, BYTES).decoding.eos == (7, 9, line_end)
    other = settings_of(*composed("task=longbench", "task.subset=qasper", file))
    assert with_stop_tokens(other, model, BYTES) is other

    class Words:  # a tokenizer that drops white space, as the testbed's does: nothing it has can be a line end
        def __call__(self, text, add_special_tokens=True):
            return SimpleNamespace(input_ids=[len(word) for word in text.split()])

    assert with_stop_tokens(samsum, model, Words()) is samsum


# ---- data


def zipped(path: Path) -> str:
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(FOLDER.glob("*.jsonl")):
            archive.write(file, f"data/{file.name}")
    return str(path)


def test_zip_folder_and_file_are_the_same(tmp_path):
    unpacked = tmp_path / "deep" / "data"
    unpacked.mkdir(parents=True)
    (unpacked / "qasper.jsonl").write_bytes((FOLDER / "qasper.jsonl").read_bytes())
    given = [zipped(tmp_path / "data.zip"), str(tmp_path / "deep"), str(FOLDER), str(FOLDER / "qasper.jsonl")]
    tasks = [LongBench(subset="qasper", data_files=path) for path in given]
    for task in tasks:
        task.check()
        assert list(task.examples()) == list(QASPER.examples())
    assert len({task.fingerprint() for task in tasks}) == 1
    assert QASPER.fingerprint() != LongBench(subset="trec", data_files=str(FOLDER)).fingerprint()
    drawn = LongBench(subset="qasper", data_files=given[0], sample="with_replacement", limit=5, seed=1)
    assert [e.id.partition("#")[0] for e in drawn.examples()] == [
        e.id.partition("#")[0] for e in replace(drawn, data_files=given[3]).examples()
    ]


def test_the_hubs_data_zip_is_read_without_its_script(tmp_path, monkeypatch):
    """As in the hub's cache after one download: nothing runs LongBench.py, which `datasets` 4 refuses."""
    from huggingface_hub import constants

    commit, place = "0" * 40, tmp_path / "datasets--zai-org--LongBench"
    snapshot = place / "snapshots" / commit
    snapshot.mkdir(parents=True)
    zipped(snapshot / "data.zip")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    task = LongBench(subset="qasper", revision=commit)
    task.check()
    assert list(task.examples()) == list(QASPER.examples())
    assert task.fingerprint() == f"hub:zai-org/LongBench/data.zip, qasper, revision {commit}"
    with pytest.raises(ConfigError) as caught:
        LongBench(subset="qasper", revision="1" * 40).check()
    for words in (
        "cannot fetch zai-org/LongBench/data.zip",
        "make the hub reachable",
        "task.data_files=PATH (data.zip,",
    ):
        assert words in str(caught.value)


def test_a_reformatted_copy_is_asked_for_by_name():
    source = LongBench(subset="trec", extended=True, hub_id="someone/copy", hub_file=None, revision=None).source
    assert (source.hub_id, source.hub_config, source.split, source.hub_file) == ("someone/copy", "trec_e", "test", None)
    with pytest.raises(ConfigError, match="someone/copy/trec_e, split test"):
        list(source.rows())


ROW = json.loads((FOLDER / "trec.jsonl").read_text().splitlines()[0])


def test_rows_of_longbench_e_are_not_the_subsets(tmp_path):
    """Under the subset's name they would count for the average of the 14."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**ROW, "dataset": "trec_e"}) + "\n")
    assert LongBench(subset="trec", extended=True, data_files=str(path)).label("longbench") == "longbench/trec_e"
    LongBench(subset="trec", extended=True, data_files=str(path)).check()
    with pytest.raises(ConfigError, match=r"is of 'trec_e'.* set task\.subset=trec task\.extended=true"):
        LongBench(subset="trec", data_files=str(path)).check()


def test_bad_archives(tmp_path):
    with pytest.raises(ConfigError, match=r"musique.jsonl is not in .*data.zip, which holds multifieldqa_zh"):
        LongBench(subset="musique", data_files=zipped(tmp_path / "data.zip")).check()
    with pytest.raises(ConfigError, match=r"musique.jsonl is not in the folder"):
        LongBench(subset="musique", data_files=str(FOLDER)).check()
    (tmp_path / "bad.zip").write_bytes(b"PK no archive")
    with pytest.raises(ConfigError, match=r"cannot read .*bad.zip"):
        LongBench(subset="qasper", data_files=str(tmp_path / "bad.zip")).check()
    with zipfile.ZipFile(tmp_path / "torn.zip", "w") as archive:
        archive.writestr("data/qasper.jsonl", '{"a": 1}\n[2]\n')
    with pytest.raises(ConfigError, match=r"row 1 of qasper in .*torn.zip has no field 'context'"):
        LongBench(subset="qasper", data_files=str(tmp_path / "torn.zip"), limit=1).check()
    with pytest.raises(ConfigError, match=r"line 2 of qasper in .*torn.zip is no object with fields but of type list"):
        list(LongBench(subset="qasper", data_files=str(tmp_path / "torn.zip")).source.rows())


def declared(archive: Path, size: int) -> Path:
    """An archive whose headers say that its only member unpacks to `size` bytes."""
    data = bytearray(archive.read_bytes())
    data[22:26] = size.to_bytes(4, "little")  # local header
    at = data.index(b"PK\1\2") + 24  # central directory
    data[at : at + 4] = size.to_bytes(4, "little")
    archive.write_bytes(data)
    return archive


def bomb(path: Path, text: bytes = bytes(32 << 20)) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data/qasper.jsonl", text)
    return path


def encrypted(path: Path) -> Path:
    data = bytearray(bomb(path, b"{}").read_bytes())
    for at in (6, data.index(b"PK\1\2") + 8):
        data[at] |= 1
    path.write_bytes(data)
    return path


def twice(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/qasper.jsonl", "{}")
        archive.writestr("b/qasper.jsonl", "{}")
    return path


def damaged(path: Path) -> Path:
    text = "".join(f'{{"a": "{number}"}}\n' for number in range(9999)).encode()
    data = bytearray(bomb(path, text).read_bytes())
    data[2000:2040] = bytes(40)
    path.write_bytes(data)
    return path


def cut(path: Path) -> Path:
    path.write_bytes(bomb(path, bytes(9999)).read_bytes()[:-30])
    return path


ARCHIVES = {
    "line 1 of qasper.jsonl is longer than 1": bomb,
    "cannot read .*: Bad CRC-32 for file": lambda path: declared(bomb(path), 5000),
    "line 1 of qasper.jsonl is longer than 1 MiB": lambda path: bomb(path, b"x" * (2 << 20)),
    "is encrypted, password required .*; .* unpack it": encrypted,
    "qasper.jsonl is in .* 2 times": twice,
    "cannot read .*damaged.*; fetch it again": damaged,
    "cannot read .*: File is not a zip file; fetch it again": cut,
    "is not JSON: maximum recursion": lambda path: bomb(path, b"[" * 99999 + b"]" * 99999),
    "is not JSON: 'utf-8' codec": lambda path: bomb(path, b'{"a": "\xff"}'),
    "is not JSON: NaN is no JSON number": lambda path: bomb(path, b'{"a": NaN}'),
}


@pytest.mark.parametrize("words", ARCHIVES)
def test_no_archive_takes_the_memory_or_ends_in_a_traceback(tmp_path, monkeypatch, words):
    """One line that names the file; 32 MiB of zeros behind 30 kB stand for gigabytes."""
    monkeypatch.setattr(archive, "LINE", 1 << 20)
    made = ARCHIVES[words](tmp_path / "damaged.zip")
    task = LongBench(subset="qasper", data_files=str(made))

    def read():
        task.fingerprint()
        list(task.source.rows())

    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=words) as caught:
            read()
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value) and "damaged.zip" in str(caught.value)


def test_an_archive_is_streamed(tmp_path):
    """The first row of many, and the digest of all of them, without holding the member."""
    made = bomb(tmp_path / "large.zip", b'{"a": "some words, again and again"}\n' * (1 << 19))
    source = LongBench(subset="qasper", data_files=str(made)).source
    tracemalloc.start()
    try:
        assert source.fingerprint() and next(source.rows())[1] == {"a": "some words, again and again"}
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
    finally:
        tracemalloc.stop()


# ---- real rows, where they are

REAL = {
    **{"2wikimqa": "2wikimqa_e.103", "gov_report": "gov_report_e.102", "multi_news": "multi_news"},
    **{"narrativeqa": "narrativeqa.20", "passage_count": "passage_count_e.102", "samsum": "samsum_e.102"},
    **{"passage_retrieval_en": "passage_retrieval_en_e.10", "trec": "trec_e.104", "triviaqa": "triviaqa_e.101"},
    **{"repobench-p": "repobench-p_e.3", "lcc": "lcc_e.13", "hotpotqa": "hotpotqa_e.13"},
    **{"passage_retrieval_zh": "passage_retrieval_zh.first20", "multifieldqa_en": "multifieldqa_en_e.11"},
}


@pytest.mark.parametrize("subset", REAL)
def test_real_rows(subset):
    path = SHARED / "data" / "longbench" / f"{REAL[subset]}.jsonl"
    if not path.is_file():
        pytest.skip(f"no data at {path}")
    task = LongBench(subset=subset, extended="_e." in path.name, data_files=str(path), limit=20)
    examples = list(task.examples())
    assert len(examples) == len({example.id for example in examples}) > 0
    row = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    official = SUBSETS[subset].prompt.format(context=row["context"], input=row["input"])
    assert examples[0].prompt == official
    for example in examples[:5]:
        assert task.score(example.reference, example.reference, example)["score"] == pytest.approx(100, abs=1e-5)


# The average over LongBench's data sets: by hand, complete or not, and from real run folders.


# PQCache's table 3 (arXiv:2407.12820), Full, whose printed average is that of its column
LLAMA2 = [18.78, 22.11, 36.77, 27.83, 31.51, 8.31, 26.91, 20.68, 26.23, 64.00, 83.26, 41.53, 2.92, 8.00]


def frame(*runs):
    """(method, kv_ratio, {data set: score}) -> rows as kvexp.results.table makes them."""
    rows = [
        {
            **{"model": "m", "task": f"longbench/{name}", "method": method, "kv_ratio": ratio, "setting": ""},
            **{"numerics": 1, "status": "done", "score": score, "hash": f"{method}{ratio}{name}"},
            "baseline": None if method == "full" else f"full{math.nan}{name}",
        }
        for method, ratio, scores in runs
        for name, score in scores.items()
    ]
    return pd.DataFrame(rows)


def test_the_average_of_the_paper():
    full = dict(zip(FOURTEEN, LLAMA2, strict=True))
    found = averages(frame(("full", math.nan, full), ("h2o", 0.2, {name: score / 2 for name, score in full.items()})))
    assert found["method"].tolist() == ["full", "h2o"]
    assert round(found["average"][0], 2) == 29.92
    assert found["of_full"].tolist() == pytest.approx([100, 50])
    assert found.loc[0, list(FOURTEEN)].tolist() == LLAMA2 and found["missing"].tolist() == ["", ""]


def test_each_data_set_may_have_a_file_of_its_own():
    """Without an archive at hand: the names of the files do not part what belongs together, two files of one do."""
    own = frame(("full", math.nan, {"trec": 60.0, "qmsum": 20.0}))
    own["setting"] = ["seed=1 task.data_files=trec.jsonl", "seed=1 task.data_files=qmsum.jsonl"]
    found = averages(own, names=("trec", "qmsum"))
    assert found["average"].tolist() == [40.0] and found["setting"].tolist() == ["seed=1"]
    again = own.iloc[[0]].assign(score=10.0, hash="again", setting="seed=1 task.data_files=other.jsonl")
    parted = averages(pd.concat([own, again]), names=("trec", "qmsum"))
    assert parted["average"].isna().all() and len(parted) == 3
    other = own.iloc[[0]].assign(score=10.0, hash="other", setting="seed=2 task.data_files=trec.jsonl")
    assert averages(pd.concat([own, other]), names=("trec", "qmsum"))["average"].tolist()[0] == 40.0


def test_one_missing_means_no_average():
    full = dict(zip(FOURTEEN, LLAMA2, strict=True))
    less = {name: score for name, score in full.items() if name not in ("trec", "qmsum")}
    found = averages(frame(("full", math.nan, full), ("h2o", 0.2, less | {"lcc": 50.0}), ("h2o", 0.5, full)))
    assert found["missing"].tolist() == ["", "qmsum, trec", ""]
    assert math.isnan(found["average"][1]) and math.isnan(found["of_full"][1])
    assert found["lcc"].tolist()[1] == 50.0 and found["kv_ratio"].tolist()[1:] == [0.2, 0.5]
    small = averages(frame(("full", math.nan, {"trec": 60.0, "qmsum": 20.0})), names=("trec", "qmsum"))
    assert small["average"].tolist() == [40.0]


def test_unfinished_runs_and_other_tasks_do_not_count():
    whole = frame(("full", math.nan, {"trec": 60.0, "qmsum": 20.0}))
    whole.loc[0, "status"] = "partial"
    whole.loc[1, "task"] = "xsum"
    assert averages(whole, names=("trec",)).empty
    assert averages(pd.DataFrame()).empty


def test_from_run_folders(tmp_path, capsys):
    assert main([str(tmp_path), "--view", "longbench"]) == 1
    hashes = {}
    for method, scores in (("full", {"trec": 50.0, "qasper": 30.0}), ("h2o", {"trec": 25.0, "qasper": 15.0})):
        for name, given in scores.items():
            labels = {"model": "m", "task": f"longbench/{name}", "method": method, "kv_ratio": None, "setting": ""}
            record = Run.open(tmp_path, {"m": method, "n": name}, labels, {}, baseline=hashes.get(name))
            record.append({"example": "a", "metrics": {"score": given}, "receipt": {"first_eviction_step": 0}})
            record.append({"example": "b", "metrics": {"score": 0.0}, "receipt": {"first_eviction_step": 0}})
            record.finish(2)
            hashes.setdefault(name, record.hash)
    found = averages(table(tmp_path), names=("qasper", "trec"))
    assert found["average"].tolist() == [20.0, 10.0] and found["of_full"].tolist() == [100.0, 50.0]
    assert main([str(tmp_path), "--view", "longbench", "--csv", str(tmp_path / "out.csv")]) == 0
    assert "no average yet, missing: narrativeqa" in capsys.readouterr().out
    assert len(pd.read_csv(tmp_path / "out.csv")) == 2
    assert main([str(tmp_path / "gone"), "--view", "longbench"]) == 2


# LongBench's metrics: by hand, and to the digit of the published scores of a model's stored predictions.


PUBLISHED = SHARED / "data" / "longbench_predictions" / "llama2-7b-chat"
ENGLISH = [
    *("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum"),
    *("multi_news", "trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
]


@pytest.mark.parametrize("name", ENGLISH)
def test_published_scores_come_out_exactly(name):
    if not PUBLISHED.is_dir():
        pytest.skip(f"no predictions at {PUBLISHED}")
    rows = [json.loads(line) for line in (PUBLISHED / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    total = sum(score(SUBSETS[name], row["pred"], row) for row in rows)
    assert round(100 * total / len(rows), 2) == json.loads((PUBLISHED / "result.json").read_text())[name]


def test_words_of_answers():
    assert normalise("  The  U.S.A. -- an 'old' name! ") == "usa old name"
    assert qa_f1("The cat sat.", "a cat sat down") == pytest.approx(0.8)  # 2 of 2 and 2 of 3
    assert qa_f1("cat cat", "cat dog") == 0.5  # a bag, not a set: 1 of 2 and 1 of 2
    assert qa_f1("", "cat") == qa_f1("the", "cat") == qa_f1("cat", "") == 0
    assert exact_match("The Cat!", "cat") == 1 and exact_match("cats", "cat") == 0
    assert contains("It is a big red barn, he said", "the Big red") == 1
    assert contains("It is a bigger red barn", "big red") == contains("anything", "the") == 0
    # sandwich, sit, Dolores: 3 of eat sandwich sit dolores park sunny day
    assert (
        word_recall("sit in Dolores with a sandwich", "eat a sandwich and sit in Dolores Park on a sunny day") == 3 / 7
    )
    assert word_recall("to be", "to be or not") == 0 and word_recall("not", "to be or not") == 1
    assert word_recall("of it", "of it") == 1  # nothing but function words: then those count


def test_rouge_l_is_the_packages():
    # a c b against a b c: two words long, and its walk meets b before c; 1e-8 is the package's
    assert rouge_l("a b c", "a c b") == 2 * (4 / 9) / (4 / 3 + 1e-8)
    assert rouge_l("a a a", "a") == 2 / (2 + 1e-8)  # distinct words
    # the union over all pairs of sentences: {a b} with the first and {c} with the second, of 3 and 4 words
    assert rouge_l("a b c", "a b. c d") == 2 * (1 * 3 / 4) / (1 + 3 / 4 + 1e-8)
    # white space behind a full stop is a sentence of one empty word, which counts as one
    assert rouge_l("a. ", "a") == 2 * (1 / 2 * 1) / (3 / 2 + 1e-8)
    assert rouge_l("...", "a") == rouge_l("", "a") == rouge_l("a", ".") == 0


def test_classification_with_its_slip():
    classes = ["Food", "Date", "Other location"]
    assert classification("Date", "Date", classes) == 1
    assert classification("Food or Date", "Date", classes) == 0.5
    assert classification("food", "Food", classes) == 0
    # A goes, and the name behind it is passed over: AB stays, though it is a part of ABC too
    assert classification("ABC", "ABC", ["A", "AB", "ABC"]) == 0.5
    assert classification("AB C", "C", ["A", "AB", "C"]) == pytest.approx(1 / 3)


def test_numbers():
    assert count("There are 5 of 15, so 5.", "5") == pytest.approx(2 / 3)
    assert count("none", "5") == 0
    assert retrieval("Paragraph 3 or 4", "Paragraph 3") == 0.5
    assert retrieval("段落12", "段落12") == 1
    with pytest.raises(ConfigError, match="must name a paragraph"):
        retrieval("3", "third")


def test_code_similarity():
    assert code_similarity("\n\n# note\n// note\n`x`\nreturn x", "return y") == 0.88  # 14 of 16, rounded to even
    assert code_similarity("abcdexxx", "abcdeyyy") == 0.62  # 62.5, rounded to even
    assert code_similarity("", "x") == code_similarity("# all\n# notes", "x") == 0
    assert code_similarity("same\nother", "same") == 1


def test_chinese_words(monkeypatch):
    if importlib.util.find_spec("jieba") is None:
        pytest.skip("jieba is not installed; it comes with kvexp[chinese]")
    assert qa_f1_zh("我来到北京清华大学。", "北京清华大学") == pytest.approx(
        2 / 3
    )  # 我 来到 北京 清华大学: 2 of 4 and 2 of 2
    assert rouge_l_zh("我来到北京", "我来到北京") == 2 / (2 + 1e-8)


def test_without_jieba_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(ConfigError, match=r"pip install jieba \(or kvexp\[chinese\]\)"):
        check_jieba()
