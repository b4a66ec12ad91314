"""The marked text, in a terminal and as a page, of a log made by hand; the token texts it is made of."""

from __future__ import annotations

import dataclasses
import io
import json
from html.parser import HTMLParser

import pandas as pd
import pytest
import torch
from rich.console import Console
from test_eviction_log import case_of, job, run_job, run_of
from test_twin import losses
from tiny import stock

from kvexp.diagnose.show import page, show
from kvexp.generate.prefill import decode_step
from kvexp.hf.cache import mark, texts_of
from kvexp.hf.load import byte_tokenizer
from kvexp.retrieval import Oracle, Quest, SparQ
from kvexp.run.evictions import TWIN, ExampleLog, read_example_log, read_table, view_of, write_example_log
from kvexp.run.store import Run
from kvexp.util import ConfigError

TEXTS = ["a", " <b>", " c\n", "d", " \u65e5\u672c", " ?", " yes", "&"]  # 5 of the prompt, 1 asked, 2 answered
LOG = ExampleLog("ex", 5, 1, list(range(8)), TEXTS, heads=[3, 3], same_output=True, same_kept=True)
GONE = pd.DataFrame(
    [(0, 0, 0, 1), (0, 0, 1, 1), (0, 0, 2, 1), (0, 1, 0, 1), (0, 1, 1, 1), (0, 1, 2, 1), (0, 1, 2, 3), (1, 0, 0, 2)],
    columns=["step", "layer", "head", "position"],
)


def printed(view, width=40):
    out = io.StringIO()
    show(view, Console(file=out, width=width, color_system=None))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_counts_by_hand():
    at_prompt, later = view_of(LOG, GONE), view_of(LOG, GONE, step=1)
    assert at_prompt.kept.tolist() == [[3, 0, 3, 3, 3, 0, 0, 0], [3, 0, 3, 2, 3, 0, 0, 0]]
    assert at_prompt.counts.tolist() == [6, 0, 6, 5, 6, 0, 0, 0] and at_prompt.present == 5
    assert later.counts.tolist() == [6, 0, 5, 5, 6, 6, 0, 0] and later.present == 6
    assert view_of(LOG, GONE, layer=1).counts.tolist() == [3, 0, 3, 2, 3, 0, 0, 0]
    assert [entry["kept"] for entry in later.data()["tokens"]] == [6, 0, 5, 5, 6, 6, None, None]
    assert later.data()["tokens"][2]["by_layer"] == [2, 3]


@pytest.mark.parametrize(("asked", "reason"), [({"step": 3}, "from 0 .* to 2"), ({"layer": 2}, "from 0 to 1")])
def test_what_is_not_there(asked, reason):
    with pytest.raises(ConfigError, match=reason):
        view_of(LOG, GONE, **asked)


@pytest.mark.parametrize(
    "table",
    [
        GONE.drop(columns="layer"),
        GONE.assign(position=8),
        GONE.assign(layer=-1),
        GONE.assign(position=["x"] * len(GONE)),
        GONE.assign(step="now"),
    ],
)
def test_a_damaged_log_is_one_line(table):
    with pytest.raises(ConfigError, match=r"the log of evictions of example ex is damaged: .*remove it and run"):
        view_of(LOG, table)


WHOLE = dataclasses.asdict(LOG)
WRONG = [{name: value} for name in ("ids", "heads", "texts", "prompt_tokens") for value in (None, "5", [[]])]
DAMAGED = ["{", "[]", "[" * 99999, json.dumps({name: value for name, value in WHOLE.items() if name != "ids"})]
DAMAGED += [json.dumps(WHOLE | one) for one in (*WRONG, {"prompt_tokens": 99}, {"more": 1})]


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_description_of_a_log_is_one_line(tmp_path, text):
    run = Run.open(tmp_path, {"a": 1}, {"method": "h2o"})
    write_example_log(run, LOG)
    assert read_example_log(run, "ex") == LOG
    (file,) = (run.path / "diagnose").glob("ex*.json")
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"ex.*\.json: .*; remove the file and run the same command again"):
        read_example_log(run, "ex")


def test_every_token_has_its_mark_below_it():
    lines = printed(view_of(LOG, GONE), width=90)
    assert lines[1:5] == ["a <b> c\u21b5", "#....###", "d \u65e5\u672c ? yes&", "8#####"]
    assert "of 5 tokens 3 are held by all heads, 1 by some, 1 by none" in lines[-1]
    narrow = printed(view_of(LOG, GONE), width=6)
    assert narrow[narrow.index("a <b>") + 1] == "#...."


def test_marks_never_say_none_or_all_of_some():
    assert [mark(n, 16) for n in (0, 1, 8, 15, 16)] == [".", "1", "5", "9", "#"]
    assert mark(1, 1024) == "1" and mark(1023, 1024) == "9"


class _Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.text, self.spans, self.inside, self.tags = "", [], False, set()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag == "span":
            self.spans.append(dict(attributes))
            self.inside = True

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        self.text += data if self.inside else ""


def test_the_page_shows_the_text_and_runs_nothing():
    reader = _Reader()
    reader.feed(page(view_of(LOG, GONE, step=1), 'h2o "<script>'))
    assert reader.text == "".join(TEXTS)
    assert reader.tags <= {"html", "head", "meta", "title", "style", "body", "h1", "p", "div", "span"}
    assert [span["class"] for span in reader.spans] == [
        *("all", "none", "some", "some", "all"),
        *("all question", "later answer", "later answer"),
    ]
    assert reader.spans[2]["title"] == "position 2: kept by 5 of 6 heads\nlayer 0: 2 of 3\nlayer 1: 3 of 3"
    assert not any(name.startswith("on") for span in reader.spans for name in span)


def test_texts_of_tokens_join_to_the_text():
    words = byte_tokenizer()
    for text in ("h\u00e9llo w\u00f6rld \u2026 \u65e5\u672c", "plain", "\U0001f600\n\n x"):
        ids = words(text).input_ids
        texts = texts_of(words, ids)
        assert "".join(texts) == words.decode(ids) and len(texts) == len(ids)
    broken = [*words("a").input_ids, *words("\u65e5").input_ids[1:3], *words("b").input_ids[1:]]
    assert texts_of(words, broken)[-1].endswith("b")


# The twin of methods that keep everything and select: what a step did not attend to, by Hugging Face's attention.


@pytest.mark.parametrize("method", [Oracle(), Quest(page=4), SparQ(r=6)], ids=lambda method: method.name)
def test_what_is_lost_is_what_a_step_did_not_attend_to(method):
    case = case_of("llama", method)
    frame, answer, _ = losses(case)
    ids = [*case.prompt, *answer]
    with torch.no_grad():
        whole = stock("llama")(torch.tensor([ids]), output_attentions=True)
    context = case.prefill_prompt()
    for step, token in enumerate(answer[:-1]):
        at = torch.tensor([[len(case.prompt) + step]])
        with torch.no_grad():
            decode_step(case.model, torch.full_like(at, token), at, context.cache)
        for layer in range(2):
            weights = whole.attentions[layer][0, :, int(at), : int(at) + 1]  # [H * G, S]
            chosen = context.cache.layer_states[layer].kept_positions()[0]
            per_head = torch.tensor(
                [1 - float(weights[q, chosen[q * len(chosen) // len(weights)]].sum()) for q in range(15)]
            )
            mine = frame[(frame.step == step + 1) & (frame.layer == layer)].sort_values("head")
            torch.testing.assert_close(
                torch.tensor(mine.lost.to_numpy()), per_head.view(3, 5).mean(1), atol=3e-5, rtol=1e-4
            )
            assert (mine.kept <= 12).all() and (mine.lost > 0).any()


def test_an_oracle_overlaps_with_the_ideal_set_and_a_run_gets_its_twin(tmp_path, command):
    run_job(job(tmp_path, "method=oracle", "diagnose=twin", limit=2))
    assert not command.failures
    run = run_of(tmp_path, "oracle")
    for row in run.rows():
        frame, told = read_table(run, row["example"], TWIN), read_example_log(run, row["example"])
        assert told.same and len(frame) and frame.lost.ge(frame.lost_ideal - 1e-6).all()
        assert frame.overlap.mean() > 0.5 and set(frame["head"]) == set(range(told.heads[0]))
