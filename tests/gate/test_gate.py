"""kvexp gate against fake servers: numbers, verdict, exit codes, what is refused, and what goes wrong on the way."""

from __future__ import annotations

import json
import re
import socket
import time

import numpy as np
import pytest
from fake_server import PIECES, Fake, Model, ids_of, send, serve

from kvexp.gate import command, served
from kvexp.gate.command import main

TEXTS = ["abcadde", "babelfidea", "cabbage", "decade", "facade", "bead", "jackal", "khaki"]
PLACES, NEW = 3, 6


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(served, "PAUSES_S", (0.0, 0.0))


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return path


def gate(prompts, urls, capsys, *words):
    """(exit code, report, what was printed beside it)."""
    options = [f"places={PLACES}", f"max_tokens={NEW}", "share=0.6", "confidence=0.8", "--json"]
    options += [f"outputs_dir={prompts.parent / 'out'}", f"data={prompts}"]
    code = main([f"baseline={urls[0]}", f"candidate={urls[1]}", *options, *words])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else None, err


def compare(prompts, baseline, candidate, capsys, *words, path=""):
    with serve(baseline) as first, serve(candidate) as other:
        return gate(prompts, (first + path, other + path), capsys, *words)


def truth(noise):
    """Mean KL, share of equal likeliest tokens, and answers' lengths of each text, from the models themselves."""
    full, other, rows = Model(), Model(noise), []
    for text in TEXTS:
        ids = ids_of(text)
        answer = full.answer(ids, NEW)
        pairs = [
            (full.logprobs([*ids, *answer[:at]]), other.logprobs([*ids, *answer[:at]]))
            for at in range(len(answer[:PLACES]))
        ]
        kl = np.mean([sum(np.exp(p) * (p - q)) for p, q in pairs])
        same = np.mean([p.argmax() == q.argmax() for p, q in pairs])
        rows.append((kl, same, len(answer), len(other.answer(ids, NEW))))
    return rows


@pytest.mark.parametrize("kind", ["llama", "vllm"])
@pytest.mark.parametrize(("noise", "limit", "verdict"), [(0.0, 1e-6, "pass"), (0.5, 10, "pass"), (0.5, 1e-3, "fail")])
def test_numbers_are_those_of_the_models_and_the_exit_code_is_the_verdict(prompts, capsys, kind, noise, limit, verdict):
    fakes = Fake(kind), Fake(kind, Model(noise))
    code, report, _ = compare(prompts, *fakes, capsys, f"kl={limit}")
    assert (report["verdict"], code) == (verdict, {"pass": 0, "fail": 1}[verdict])
    expected = truth(noise)[: report["measured"]]
    rows = report["prompts"]
    assert [row["kl"] for row in rows] == pytest.approx([row[0] for row in expected], abs=2e-6)
    assert [row["top1"] for row in rows] == pytest.approx([row[1] for row in expected])
    lengths = [(row["baseline"]["new_tokens"], row["candidate"]["new_tokens"]) for row in rows]
    assert lengths == [row[2:] for row in expected]
    assert len(rows) == (
        len(TEXTS) if verdict == "pass" else command.Terms("", "", "", share=0.6, confidence=0.8).fails_from(8)
    )
    assert not any(row["lower_bound"] for row in rows)
    generated = [body for path, body, _ in fakes[0].requests if path.endswith("completion") or "completions" in path]
    assert all(body["temperature"] == 0 and isinstance(body["prompt"], list) for body in generated)


def test_top_k_is_a_lower_bound_by_which_kl_cannot_pass_but_top1_can(prompts, capsys):
    for words, code in ((["kl=10"], 3), (["kl=0.0001"], 1), (["top1=0.1"], 0)):
        found, report, _ = compare(prompts, Fake(), Fake(model=Model(0.5)), capsys, "top=5", *words)
        assert found == code
        rows, expected = report["prompts"], truth(0.5)
        assert all(row["lower_bound"] and row["kl"] <= kl for row, (kl, *_) in zip(rows, expected, strict=False))
        assert report["not_known"] == (len(TEXTS) if code == 3 else 0)
    assert sum(row["kl"] for row in rows) > 0.3 * sum(row[0] for row in expected)


@pytest.mark.parametrize("words", ["top=1", "top=4"])
def test_a_server_of_texts_gives_its_likeliest_few_tokens(prompts, capsys, words):
    """As OpenVINO Model Server: no token ids, one log-probability or a few."""
    fakes = Fake("openai", most=4), Fake("openai", Model(0.5), most=4)
    code, report, _ = compare(prompts, *fakes, capsys, words, "top1=0.1", "kl=10", path="/v3")
    assert code == 3
    assert [row["top1"] for row in report["prompts"]] == pytest.approx([row[1] for row in truth(0.5)])
    assert all(row["kl"] <= kl for row, (kl, *_) in zip(report["prompts"], truth(0.5), strict=True))


def test_a_server_of_ids_is_fed_texts_where_the_other_takes_nothing_else(prompts, capsys):
    code, report, _ = compare(prompts, Fake("vllm"), Fake("openai"), capsys, "top=4", "top1=0.9")
    assert code == 0
    assert report["baseline"]["kind"] == "OpenAI API"


def test_length_and_json_are_limits_too(prompts, capsys, monkeypatch):
    _, lengths, _ = compare(prompts, Fake(), Fake(model=Model(0.5)), capsys, "length=0")
    changed = [ours != theirs for _, _, ours, theirs in truth(0.5)]
    assert [row["state"] == "beyond" for row in lengths["prompts"]] == changed[: lengths["measured"]]
    answers = ["".join(PIECES[token] for token in Model().answer(ids_of(text), NEW)) for text in TEXTS]
    monkeypatch.setattr(command, "is_json", lambda text: text in answers[:3])
    code, report, _ = compare(prompts, Fake(), Fake(), capsys, "valid=json")
    assert code == 3 and report["n"] == 3
    assert [row["state"] for row in report["prompts"]] == ["within"] * 3 + ["left out"] * 5


def test_chats_go_through_the_servers_own_template(tmp_path, capsys):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in TEXTS))
    for kind in ("llama", "vllm"):
        fake = Fake(kind)
        code, report, _ = compare(path, fake, Fake(kind), capsys)
        assert code == 0
        assert report["prompts"][0]["prompt_tokens"] == len(TEXTS[0]) + 2


# What goes wrong: one sentence each, a few tries, and no row lost.

BROKEN = {
    "500": (lambda handler, _: send(handler, {"error": {"message": "out of memory"}}, 500), "500 .*out of memory", 3),
    "not json": (lambda handler, _: send(handler, b'{"content": "a'), "sent no JSON", 3),
    "NaN": (lambda handler, _: send(handler, b'{"content": NaN}'), "NaN is not JSON", 3),
    "cut off": (
        lambda handler, _: send(handler, b"{}", **{"Content-Length": "50"}) or hang_up(handler),
        "",
        3,
    ),
    "reset": (lambda handler, _: hang_up(handler), "", 3),
    "error in 200": (lambda *_: {"error": {"message": "no slot"}}, "no slot", 1),
    "empty": (lambda *_: {}, "without", 1),
    "400": (lambda handler, _: send(handler, {"error": {"message": "too long"}}, 400), "400 .*too long", 1),
    "hang": (lambda *_: time.sleep(1.5), "no whole reply within 0.5 s", 1),
    "drip": (lambda handler, _: drip(handler), "no whole reply within 0.5 s", 1),
    "large": (lambda handler, _: send(handler, b'"' + b"a" * 5000 + b'"'), "sent more than", 1),
    "redirect": (
        lambda handler, _: send(handler, {}, 307, Location="http://127.0.0.1:9/x"),
        "redirects to http://127.0.0.1:9/x, which is not followed",
        1,
    ),
}


def hang_up(handler):
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


def drip(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    for _ in range(8):
        handler.wfile.write(b" ")
        time.sleep(0.2)


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("first", [False, True], ids=["on the way", "at once"])
def test_a_server_that_breaks_is_one_sentence_and_the_rows_go_on(prompts, capsys, monkeypatch, name, first):
    fault, said, tries = BROKEN[name]
    monkeypatch.setattr(served, "MOST", 4000)
    candidate = Fake()
    place = "/props" if first else "/completion"
    fine = [] if first else [lambda handler, body: candidate.reply("/completion", body)] * 12
    candidate.faults[place] = [*fine, *[fault] * tries]
    with serve(Fake()) as baseline, serve(candidate) as other:
        code, report, err = gate(prompts, (baseline, other), capsys, "timeout=0.5")
        asked = sum(path == place for path, *_ in candidate.requests)
        assert asked == len(fine) + tries, (report, err)
        if first:
            assert code == 2 and report is None
            (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
        else:
            assert code == 3 and report["verdict"] == "undecided" and 0 < report["measured"] < len(TEXTS)
            line = report["trouble"]
        assert "candidate: http" in line
        assert "Traceback" not in err
        assert re.search(said, line), line
        before = report["measured"] if report else 0
        code, report, err = gate(prompts, (baseline, other), capsys)
        assert code == 0 and report["measured"] == len(TEXTS)
        assert (f"{before} of them have rows" in err) == bool(before)


def changed(**fields):
    """A reply of /completion in which the likeliest tokens of a place are other ones."""

    def fault(handler, body):
        reply = Fake().reply("/completion", body)
        if "completion_probabilities" in reply:
            entry = reply["completion_probabilities"][0]
            entry["top_logprobs"] = [
                change(place, item) for place, item in enumerate(entry["top_logprobs"]) for change in [fields["item"]]
            ][: fields.get("count")]
        return reply

    return fault


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            changed(item=lambda _, item: item, count=5),
            "asked for all log-probabilities and sent 5; top=5 asks for no more",
        ),
        (changed(item=lambda _, item: {**item, "logprob": 0.0}), "its log-probabilities are none"),
        (changed(item=lambda _, item: {**item, "logprob": None}), "a log-probability is no number|are none"),
        (changed(item=lambda _, item: {**item, "logprob": "x"}), "a log-probability is no number"),
        (changed(item=lambda _, item: {**item, "id": 3}), "sent 13 log-probabilities of 1 tokens"),
        (changed(item=lambda _, item: {"id": item["id"]}), "without logprob"),
    ],
)
def test_what_is_no_distribution_is_refused(prompts, capsys, fault, said):
    candidate = Fake()
    candidate.faults["/completion"] = [fault] * 50
    code, _, err = compare(prompts, Fake(), candidate, capsys)
    assert code == 2 and re.search(said, err), err


def test_another_vocabulary_is_refused(prompts, capsys):
    code, report, _ = compare(prompts, Fake("vllm"), Fake("vllm", Model(vocabulary=15)), capsys)
    assert code == 3 and "another vocabulary" in report["trouble"]


def test_other_tokens_are_an_error_with_the_first_prompt(prompts, capsys):
    def other(text):
        return [token + (text == TEXTS[2] and at == 4) for at, token in enumerate(ids_of(text))]

    candidate = Fake(tokenizer=other)
    code, report, err = compare(prompts, Fake(), candidate, capsys)
    assert code == 2 and report is None
    assert "of prompt 3 the baseline makes 7 tokens and the candidate 7, first different at token 5 (1 and 2)" in err
    assert all(path != "/completion" for path, *_ in candidate.requests)


def test_a_server_with_fewer_log_probabilities_says_so_before_anything_is_measured(prompts, capsys):
    code, _, err = compare(prompts, Fake("vllm"), Fake("vllm", most=-1), capsys)
    assert code == 0, err
    code, _, err = compare(prompts, Fake("vllm"), Fake("vllm", most=5), capsys, "top=9")
    assert code == 2 and "greater than max allowed: 5" in err


# Rows are those of these models.


def test_a_finished_gate_is_measured_anew_and_an_open_one_goes_on_with_the_same_models_alone(prompts, capsys):
    baseline, candidate = Fake(), Fake(model=Model(0.3))
    with serve(baseline) as first, serve(candidate) as other:

        def broken_off():
            candidate.faults["/completion"] = [lambda _, body: candidate.reply("/completion", body)] * 14
            candidate.faults["/completion"] += [lambda *_: {"error": "gone"}]
            code, report, _ = gate(prompts, (first, other), capsys, "kl=10")
            assert code == 3
            return report["measured"]

        assert broken_off() > 0
        candidate.model = Model(2.0)
        _, report, err = gate(prompts, (first, other), capsys, "kl=10")
        assert "measured anew" in err and "have rows" not in err
        assert [row["kl"] for row in report["prompts"]] == pytest.approx([row[0] for row in truth(2.0)], abs=1e-5)
        candidate.model = Model(0.0)
        _, report, err = gate(prompts, (first, other), capsys, "kl=10")
        assert report["all"]["kl"] == 0


# Security.


def test_a_token_comes_from_the_environment_and_is_in_no_output(prompts, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("KVEXP_CANDIDATE_TOKEN", "sesame")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    baseline, candidate = Fake(), Fake()
    code, _, _ = compare(prompts, baseline, candidate, capsys)
    assert code == 0
    assert {headers.get("Authorization") for *_, headers in candidate.requests} == {"Bearer sesame"}
    assert {headers.get("Authorization") for *_, headers in baseline.requests} == {None}
    candidate.faults["/tokenize"] = [lambda handler, _: send(handler, {"error": "no token sesame"}, 401)]
    code, _, err = compare(prompts, baseline, candidate, capsys)
    assert code == 2 and "401" in err and "sesame" not in err
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"sesame" in path.read_bytes()]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["baseline=ftp://a/"], "llama_cpp:FILE.gguf or transformers:FOLDER, got ftp://a/"),
        (["baseline=http://me:secret@a/"], "give it in KVEXP_BASELINE_TOKEN"),
        (["baseline=http://far.example/"], "would go to far.example in clear text"),
        (["baseline=http://a/?x=1"], "baseline must be http://HOST:PORT"),
        (["kl=0"], "kl must be above 0"),
        (["klx=1"], "did you mean kl?"),
        (["top=0"], "top must be all or a whole number"),
        (["places=9", "max_tokens=8"], "places=9 is more than an answer may have"),
        (["valid=xml"], "valid must be json"),
        (["--jsn"], "gate has no option --jsn"),
        (["baseline="], "gate needs baseline="),
        (["data=nothing.jsonl"], "data: cannot read nothing.jsonl"),
        (["baseline=llama_cpp:x.gguf?cache_q=1"], "cache_q is no setting of this engine"),
        (["baseline=llama_cpp:x.gguf?cache_k=q3"], "cache_k must be one of"),
        (["baseline=transformers:nowhere"], "there is no model 'nowhere'"),
    ],
)
def test_a_wrong_command_says_what_to_change(prompts, capsys, monkeypatch, words, said):
    monkeypatch.setenv("KVEXP_BASELINE_TOKEN", "sesame")
    given = {"baseline": "http://127.0.0.1:9", "candidate": "http://127.0.0.1:9", "data": str(prompts)}
    given |= {"outputs_dir": str(prompts.parent / "out")}
    given |= dict(word.split("=", 1) for word in words if "=" in word)
    code = main([*(f"{key}={value}" for key, value in given.items()), *(word for word in words if "=" not in word)])
    err = capsys.readouterr().err
    assert code == 2 and said in err and "secret" not in err


@pytest.mark.parametrize(
    "rows",
    [
        *([], [{"text": "a"}], [{"prompt": ""}], [{"messages": []}], [{"messages": [{"role": "user"}]}]),
        [{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}],
    ],
)
def test_a_row_without_a_prompt_is_named(prompts, capsys, rows):
    prompts.write_text("".join(map(json.dumps, rows)) + "\n")
    assert main(["baseline=http://127.0.0.1:9", "candidate=http://127.0.0.1:9", f"data={prompts}"]) == 2
    assert f"data: {'row 1 of ' * len(rows)}{prompts} holds no prompt" in capsys.readouterr().err


def test_dry_run_says_how_long_and_measures_nothing(prompts, capsys):
    code, report, err = compare(prompts, Fake(), Fake(), capsys, "--dry-run")
    assert code == 0 and report is None
    assert "at most about" in err and "8 prompts pass with at most" in err


def test_a_person_sees_a_line_per_prompt_and_the_verdict(prompts, capsys):
    with serve(Fake()) as first, serve(Fake(model=Model(0.2))) as other:
        words = [f"baseline={first}", f"candidate={other}", f"data={prompts}", f"outputs_dir={prompts.parent}", "kl=9"]
        assert main([*words, f"max_tokens={NEW}", "places=3", "share=0.6", "confidence=0.8"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if line.endswith(" within")] == [
        str(at + 1) for at in range(8)
    ]
    assert "pass: at least 0.817 of new prompts of this kind stay within 9 nats per token of the baseline" in out
