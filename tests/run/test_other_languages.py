"""Texts in other scripts than English: where needles land, which words are compared, which letters ROUGE leaves out."""

from __future__ import annotations

import itertools
import json
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from commands import settings as composed_settings

from kvexp.results.table import table
from kvexp.results.views import grid
from kvexp.run.batches import evaluate_run
from kvexp.tasks import ContextQA, Needle, Stories, Summarization
from kvexp.tasks.articles import articles
from kvexp.tasks.base import word_ends
from kvexp.tasks.metrics import (
    check_references,
    contains,
    dropped_letters,
    exact_match,
    lines,
    qa_f1,
    rouge,
    word_recall,
    words_of,
)
from kvexp.tasks.needle import from_sentence, hide
from kvexp.util.errors import ConfigError

# ruff: noqa: RUF001  # letters that look like others are what is tested


# Each said over and over; the longest piece that a needle may not be put inside of, in characters.
SCRIPTS = {
    "chinese": ("她在雨中走回家，鞋子都湿透了。天空没有一颗星星！邻居的狗在叫吗？", 15),
    "japanese": ("彼は毎朝駅まで歩いて、新聞を買う。「そうですか。」と彼女は言った！本当に？", 18),
    "fullwidth_stops": ("実験は三回行った．結果は同じだった．", 10),
    "chinese_ascii": ("他今天很忙.明天也一样!后天呢?", 8),
    "arabic": ("هل ذهب الرجل إلى السوق؟ نعم ذهب في المساء. ", 25),
    "urdu": ("وہ بازار گیا۔ پھر واپس آیا۔ ", 15),
    "hindi": ("राम बाजार गया और उसने फल खरीदे। फिर वह घर लौटा। ", 33),
    "amharic": ("ሰላም ለሁሉም። ዛሬ ጥሩ ቀን ነው። ", 16),
    "burmese": ("မင်္ဂလာပါ။ နေကောင်းလား။ ", 16),
    "armenian": ("Նա գնաց տուն։ Անձրև էր։ ", 15),
    "tibetan": ("བོད་ཀྱི་སྐད་ཡིག་ནི་གནའ་རབས་ནས་དར་བ་ཡིན།", 40),
    "thai": ("เขาเดินไปตลาดทุกเช้า แล้วซื้อผลไม้กลับบ้าน ", 24),
    "thai_unbroken": ("เขาเดินไปตลาดทุกเช้าแล้วซื้อผลไม้กลับบ้าน", 4),
    "chinese_unbroken": ("她在雨中走回家鞋子都湿透了", 1),
    "python": ("def add(a, b):\n    # adds two numbers.\n    return a + b\n\n", 40),
    "c": ('int main() {\n  printf("Hello! ");\n  return 0;\n}\n', 30),
    "code_crlf": ("foo = bar\r\nif x:\r\n    pass\r\n", 12),
    "verse": ("Shall I compare thee\nTo a summer day\nThou art lovely\nAnd temperate\n", 21),
    "table": ("17,289,name\n212,44944,other name\n", 22),
    "words": ("lorem ipsum dolor sit amet ", 6),
    "json_line": ('{"a": [1,2,3], "b": {"c": "d e f"}}', 30),
    "letters": ("x", 1),
    "emoji": ("👩‍👩‍👧‍👦", 7),
    "flags": ("🇩🇪🇫🇷", 2),
    "decomposed": ("e\u0301", 2),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_needle_stands_at_the_depth_asked_for_in_any_script(name):
    piece, longest = SCRIPTS[name]
    text = piece * (3000 // len(piece))
    for depth in (0, 10, 25, 33, 50, 75, 90, 100):
        made, (measured,) = hide(text, [(depth, "NEEDLE")])
        before, _, after = made.partition("NEEDLE")
        assert "".join((before + after).split()) == "".join(text.split())
        place = len(text) * measured / 100
        assert "".join(text[: round(place)].split()) == "".join(before.split())
        assert -1 <= len(text) * depth / 100 - place <= longest
    assert hide(text, [(0, "NEEDLE")]).depths == [0] and hide(text, [(100, "NEEDLE")]).depths == [100]


def test_no_letter_is_parted_from_its_marks():
    for piece in ("👩‍👩‍👧‍👦", "🇩🇪", "e\u0301", "👍🏽", "क्षि", "กำ้"):
        for depth in range(101):
            before = hide(piece * 60, [(depth, "NEEDLE")]).text.partition("NEEDLE")[0].rstrip()
            assert len(before) % len(piece) == 0 or piece in ("क्षि", "กำ้")
            after = (piece * 60)[len(before) :]
            assert not after or unicodedata.category(after[0])[0] != "M"


def test_a_needle_in_code_has_a_line_of_its_own():
    code = "for i in range(3):\n    total += i\n    print(total)\n" * 20
    assert "print(total)\nNEEDLE\nfor i" in hide(code, [(31, "NEEDLE")]).text
    assert hide(code, [(0, "NEEDLE")]).text.startswith("NEEDLE\nfor i")
    assert hide(code, [(100, "NEEDLE")]).text.endswith("print(total)\nNEEDLE")


def test_several_needles_and_a_text_that_is_cut():
    text = SCRIPTS["chinese"][0] * 100
    made, depths = hide(text, [(0, "A"), (50, "B"), (50, "C"), (75, "D")], 1000)
    assert depths == pytest.approx([0, 50, 50, 75], abs=1.5)
    assert "".join(c for c in made if c not in "ABCD ") == text[:1000]
    assert [c for c in made if c in "ABCD"] == list("ABCD")


def test_repeats_begin_at_other_places_of_a_text_without_english_sentences():
    for piece in ("chinese", "thai_unbroken", "python"):
        text = SCRIPTS[piece][0] * 50
        each = {from_sentence(text, share)[:60] for share in (0.0, 0.111, 0.333, 0.777)}
        assert len(each) > 1, piece
    assert from_sentence(SCRIPTS["chinese"][0], 0.3).startswith("天空")


def needle(**changed):
    given = {"needles": ("密码是 {key}。",), "questions": ("密码是什么？",), "answers": ("{key}",), "lengths": (300,)}
    return Needle(**({"filler": SCRIPTS["chinese"][0], "depths": (0, 50), **given} | changed))


def test_rows_record_the_depth_that_is():
    task = needle(repeats=2)
    made = [task.fit(example, len, 1 << 40) for example in task.examples()]
    for example in made:
        assert abs(example.info["depth_measured"] - example.info["depth"]) < 6, example.info
    many = needle(needles=("甲 {key}。", "乙 {key}。"), answers=("{key}", "{key}"))
    (first, second) = [many.fit(example, len, 1 << 40).info for example in many.examples()]
    assert first["depth_measured"] == 0 == first["depths_measured"][0] and 40 < second["depths_measured"][0] < 51
    rows = [{"metrics": {"word_recall": 1.0}, "info": {"length": 9, "depth": d, "depth_measured": m}} for d, m in
            ((0, 0.0), (50, 41.0), (50, 47.4), (75, 70.0))]  # fmt: skip
    assert grid(rows).attrs["depths"] == ["0", "50 (41-47)", "75 (70)"]


def test_a_letter_may_have_several_tokens():
    short = replace(needle(), filler=None, haystack=str(Path(__file__).parents[1] / "fixtures" / "haystack"))
    text = "字" * 200
    short.__dict__["text"] = text
    short.check()  # 200 characters, 600 bytes: a tokenizer may make 300 tokens of them


# ---- words


def test_identical_answers_are_right_in_any_script_and_however_written():
    for piece, _ in list(SCRIPTS.values())[:13]:
        reference = piece.strip()
        assert contains(f"« {reference} »", reference, True) == 1 == qa_f1(reference, reference, True)
        assert word_recall(reference, reference, True) == 1
    pairs = [("cafe\u0301", "café"), ("１２３４５", "12345"), ("٣٤", "34"), ("Straße", "STRASSE"), ("ΟΔΟΣ", "οδος")]
    pairs += [
        ("L’homme", "l'homme"),
        ("İSTANBUL", "istanbul"),
        ("ＡＢＣ", "abc"),
        ("ｶﾀｶﾅ", "カタカナ"),
        ("می‌شود", "میشود"),
    ]
    for given, reference in pairs:
        assert contains(given, reference, True) == 1, reference
    assert contains("答案是北京。", "北京", True) and contains("密码是12345。", "12345", True)
    assert contains("답은 서울입니다.", "서울", True) and not contains("Ответ: Минск", "Москва", True)
    assert contains("Цена 15 рублей", "5 рублей", True) == 0
    assert words_of("नमस्ते दुनिया") == ["नमस्ते", "दुनिया"] and words_of("42年 iPhone") == ["42", "年", "iphone"]
    # What the tasks of kvexp's own English use is what it was.
    assert contains("The “blue” cheese.", "blue") == 0 and exact_match("A cat!", "cat") == 1


def test_a_needle_in_another_script_is_found():
    task = needle(answers=("{key}",))
    (example, *_) = task.examples()
    (key,) = example.info["answers"]
    assert task.score(f"密码是{key}。", key, example) == {"word_recall": 100.0, "exact": 100.0}
    assert task.score("密码是1。", key, example) == {"word_recall": 0.0, "exact": 0.0}


def test_questions_of_ones_own_in_another_script(tmp_path):
    rows = [{"context": "北京很大。", "questions": [{"question": "首都？", "answers": ["北京"]}]},
            {"context": "Big.", "questions": [{"question": "What?", "answers": ["the city"]}]}]  # fmt: skip
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = ContextQA(data_files=str(file))
    first, second = task.examples()
    assert task.score("是北京。", "", first)["exact"] == 100 and first.info["words"] == "unicode"
    assert task.score("City.", "", second) == {"f1": 100.0, "exact": 100.0} and "words" not in second.info


def test_texts_without_spaces_have_characters_for_words():
    assert word_ends("one two  three") == [3, 7, 14] and word_ends("天空 没有") == [1, 2, 4, 5]
    made = Stories().example({"text": "天空没有一颗星星"}, "row 1")
    assert (made.prompt, made.reference) == ("天空没有", "一颗星星") and not made.skipped


# ---- ROUGE


def test_rouge_of_identical_texts_is_100_in_any_script():
    for piece, _ in list(SCRIPTS.values())[:13]:
        assert set(rouge(lines(piece, tokenizer="unicode"), lines(piece, tokenizer="unicode"), "unicode").values()) == {
            100.0
        }
        assert dropped_letters(piece) > 0
    assert rouge("Вася купил 5 яблок", "Погода 5 градусов")["rouge1"] == 100  # the digit is all that is left
    assert rouge("Вася купил 5 яблок", "Погода 5 градусов", "unicode")["rouge1"] == pytest.approx(100 * 2 / 7)
    assert rouge("cafe\u0301", "CAFÉ", "unicode")["rouge1"] == 100
    assert lines("Это раз. Это два! 这是三。四", tokenizer="unicode") == "Это раз.\nЭто два!\n这是三。\n四"


def test_english_scores_are_the_same_by_either_tokenizer():
    texts = [article.text[:1500] for article in articles()][:12]
    for one, other in itertools.pairwise(texts):
        assert rouge(lines(one), lines(other)) == rouge(
            lines(one, tokenizer="unicode"), lines(other, tokenizer="unicode"), "unicode"
        )


GERMAN = "Müller für über Grüße schön Straße größer Bäume möchte Tür öffnet natürlich " * 2 + "und " * 100


@pytest.mark.parametrize("reference", ["Привет мир", "天空。", "दुनिया", "שלום 7", GERMAN, "Được rồi nhé"])
def test_references_that_rouge_score_cannot_read_are_refused(reference):
    with pytest.raises(ConfigError, match=r"task\.rouge_tokenizer=unicode"):
        check_references(["An English one.", reference] if len(reference) > 99 else [reference])


def test_one_reference_among_many_that_rouge_score_cannot_read_is_refused():
    with pytest.raises(ConfigError, match="'Привет,'"):
        check_references([*["An English reference of seven words."] * 99, "Привет, Bob"])


def test_names_with_accents_in_english_are_not_refused():
    check_references(["Beyoncé sang in a café in São Paulo, and the naïve crowd cheered her until the end."])
    check_references([])
    check_references(["“Curly” — and … dashes"])


def settings(task, tmp_path, *words):
    return composed_settings(f"task={task}", f"outputs_dir={tmp_path / 'out'}", *words)


def rows_of(tmp_path, *summaries):
    file = tmp_path / "rows.jsonl"
    rows = [{"id": str(n), "document": "red the cat . " * 4, "summary": each} for n, each in enumerate(summaries)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return f"task.data_files={file}"


def test_a_run_is_refused_before_its_model_loads_and_goes_with_the_setting(tmp_path):
    data = rows_of(tmp_path, "Это очень короткий текст")
    with pytest.raises(ConfigError, match="would leave out 21 of the 21 letters"):
        settings("xsum", tmp_path, data).task.check()
    with pytest.raises(ConfigError, match=r"task\.rouge_tokenizer must be one of default, unicode"):
        settings("xsum", tmp_path, data, "task.rouge_tokenizer=ascii").task.check()
    mended = settings("xsum", tmp_path, data, "task.rouge_tokenizer=unicode")
    mended.task.check()
    assert mended.identity["task"]["rouge_tokenizer"] == "unicode"
    plain = settings("xsum", tmp_path, data, "task.question=after_eviction", "task.template=null")
    assert "rouge_tokenizer" not in plain.identity["task"] and "instruction_after" in plain.identity["task"]


def test_a_column_counts_the_letters_left_out(tmp_path):
    words = ["method=full", "task.max_new_tokens=2", "task.template=plain"]
    run = settings("xsum", tmp_path, rows_of(tmp_path, "A café of the naïve sort in the old town square"), *words)
    (row,) = evaluate_run(run).rows()
    assert row["info"]["dropped_letters"] == 2 + dropped_letters(row["output"])
    assert table(tmp_path / "out")["dropped_letters"].tolist() == [row["info"]["dropped_letters"]]


def test_every_summary_task_has_the_setting():
    assert {"rouge_tokenizer"} <= set(Summarization.__dataclass_fields__)


@pytest.mark.parametrize("opening", ["Table 1. ", "Hello. ", "《红楼梦》第一回。"])
@pytest.mark.parametrize("body", ["a,b,c\n", "ภาษาไทยไม่มีช่องว่าง", "x1 = f(1)\n"])
def test_a_sentence_far_in_front_holds_no_needle(opening: str, body: str) -> None:
    text = opening + body * (6000 // len(body))
    depths = hide(text, [(share, "NEEDLE") for share in (25, 50, 75)]).depths
    assert depths == pytest.approx([25, 50, 75], abs=1)


def test_marks_of_an_emoji_are_no_part_of_a_word() -> None:
    assert words_of("Москва ☀️") == ["москва"] and words_of("1️⃣ раз") == ["1", "раз"]
    assert words_of("I love it ❤️") == ["i", "love", "it"]
