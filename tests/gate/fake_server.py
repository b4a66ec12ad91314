"""Fake inference servers for tests: a tiny model behind the replies of llama-server, vLLM and OpenAI's completions."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

VOCABULARY, END = 13, 0
PIECES = ["", *"abcdefghijkl"]  # token -> its text


class Model:
    """Log-probabilities by the last three tokens. noise: nats by which a candidate's logits differ."""

    def __init__(self, noise=0.0, vocabulary=VOCABULARY):
        self.noise, self.vocabulary = noise, vocabulary

    def logprobs(self, tokens):
        seed = [len(tokens), *tokens[-3:]]
        logits = 2 * np.random.default_rng(seed).normal(size=self.vocabulary)
        logits[END] -= 2
        logits += self.noise * np.random.default_rng([7, *seed]).normal(size=self.vocabulary)
        return logits - np.log(np.exp(logits).sum())

    def answer(self, tokens, new):
        made = []
        while len(made) < new and made[-1:] != [END]:
            made.append(int(self.logprobs([*tokens, *made]).argmax()))
        return made


def ids_of(text):
    return [PIECES.index(letter) if letter in PIECES else 12 for letter in text]


class Fake:
    """What a server is made of. faults: path -> what `_do` does in place of the next replies, one after the other.

    requests: (path, body, headers) of all that came.
    """

    def __init__(self, kind="llama", model=None, most=None, tokenizer=ids_of):
        self.kind, self.model, self.most, self.tokenizer = kind, model or Model(), most, tokenizer
        self.faults, self.requests = {}, []

    def reply(self, path, body):
        if path.endswith("/models"):
            owner = {"llama": "llamacpp", "vllm": "vllm"}.get(self.kind, "OVMS")
            card = {"id": "fake", "object": "model", "created": 1, "owned_by": owner, "max_model_len": 512}
            return {"object": "list", "data": [{**card, "meta": {"n_vocab": self.model.vocabulary}}]}
        text = body.get("content") or body.get("prompt")
        if body.get("messages"):
            text = "b" + "".join(turn["content"] for turn in body["messages"]) + "c"
        return {
            "/props": lambda: {"default_generation_settings": {"n_ctx": 512}, "build_info": "b7"},
            "/version": lambda: {"version": "0.32.0"},
            "/tokenize": lambda: {"tokens": self.tokenizer(text), "count": len(text), "max_model_len": 512},
            "/apply-template": lambda: {"prompt": text},
            "/completion": lambda: self.llama(body),
            "/v1/completions": lambda: self.openai(body),
            "/v3/completions": lambda: self.openai(body),
        }[path]()

    def top(self, tokens, count):
        logprobs = self.model.logprobs(tokens)
        return [(int(token), float(logprobs[token])) for token in (-logprobs).argsort()[:count]]

    def llama(self, body):
        prompt = body["prompt"]
        answer = self.model.answer(prompt, body["n_predict"])
        reply = {"content": "".join(PIECES[token] for token in answer), "tokens": answer, "timings": {"prompt_n": 1}}
        reply["stop_type"] = "eos" if answer[-1] == END else "limit"
        if count := body.get("n_probs"):
            reply["completion_probabilities"] = [
                {
                    "id": token,
                    "token": PIECES[token],
                    "logprob": float(self.model.logprobs([*prompt, *answer[:at]])[token]),
                    "top_logprobs": [
                        {"id": id, "token": PIECES[id % 13], "bytes": [], "logprob": value}
                        for id, value in self.top([*prompt, *answer[:at]], min(count, self.most or count))
                    ],
                }
                for at, token in enumerate(answer)
            ]
        return reply

    def openai(self, body):
        by_text = isinstance(body["prompt"], str)
        prompt = ids_of(body["prompt"]) if by_text else body["prompt"]
        answer = self.model.answer(prompt, body["max_tokens"])

        def name(token):
            return f"token_id:{token}" if body.get("return_tokens_as_token_ids") else PIECES[token]

        count = body.get("logprobs")
        if count is not None and count > (self.most or count):
            raise ValueError(f"Requested sample logprobs of {count}, which is greater than max allowed: {self.most}")
        count = self.model.vocabulary if count == -1 else count
        places = [[*prompt, *answer[:at]] for at in range(len(answer))]
        choice = {
            "index": 0,
            "text": "".join(PIECES[token] for token in answer),
            "finish_reason": "stop" if answer[-1] == END else "length",
            "stop_reason": None,
            "token_ids": answer if body.get("return_token_ids") else None,
            "prompt_logprobs": None,
            "logprobs": count
            and {
                "text_offset": list(range(len(answer))),
                "tokens": [name(token) for token in answer],
                "token_logprobs": [
                    float(self.model.logprobs(place)[token]) for place, token in zip(places, answer, strict=True)
                ],
                "top_logprobs": [{name(id): value for id, value in self.top(place, count)} for place in places],
            },
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(answer)}
        return {"id": "cmpl-1", "object": "text_completion", "created": 1, "choices": [choice], "usage": usage}


@contextmanager
def serve(fake):
    """The URL of a fake server."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self):
            self.do_POST()

        def do_POST(self):
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.loads(data) if data else {}
            fake.requests.append((self.path, body, dict(self.headers)))
            queue = fake.faults.get(self.path) or []
            fault = queue.pop(0) if queue else None
            if fault is not None and (answered := fault(self, body)) is None:
                return
            if fault is None:
                try:
                    answered = fake.reply(self.path, body)
                except ValueError as error:
                    return send(self, {"error": {"message": str(error), "type": "BadRequestError", "code": 400}}, 400)
            send(self, answered)

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # a client that hangs up on a reply too long: not for its terminal
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def send(handler, value, status=200, **headers):
    """Send JSON, or bytes as they are."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    handler.send_response(status)
    for name, text in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
        handler.send_header(name, text)
    handler.end_headers()
    handler.wfile.write(data)
