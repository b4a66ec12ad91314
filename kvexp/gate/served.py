"""Models behind a URL: llama-server, vLLM, and any other server with OpenAI's completions, found by asking.

llama-server and vLLM are fed token ids. A text is walked: what is fed grows by a token from request to request, one
token is generated, and the server's prefix cache holds the rest, so that a cache is read as it is while decoding.
vLLM's prompt_logprobs would give all places in one reply, and every place of the prompt too: for 1,000 tokens and
49,152 entries some 4 GB. Other servers are fed texts, and a token is known by its text.

A URL is what the user named and nothing else: no redirect is followed, no proxy and no netrc is read, certificates are
verified, replies have a limit, and the one credential comes from the environment.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import httpx

from kvexp.gate.sides import Answer, Place, Prompt, Role, Side, SideError, Token
from kvexp.util.errors import ConfigError
from kvexp.util.output import size
from kvexp.util.strict_json import Json, parse

PAUSES_S = (0.5, 2.0)  # before a request is sent again
MOST = 64 << 20  # bytes of a reply: a whole vocabulary of 262,144 tokens has some 25 MB
SAID = 240  # letters of a server's own message
GREEDY = {"temperature": 0, "seed": 0}
NAMED = "http://HOST:PORT, with ?model=NAME where it serves several, llama_cpp:FILE.gguf or transformers:FOLDER"
FEW = 5  # the most log-probabilities that OpenAI documents for completions


class _Again(Exception):
    """A request that may be sent again. The message says why it failed."""


class Connection:
    """JSON by HTTP with one server. url: its root; model: as `?model=` names it, None for the only one."""

    def __init__(self, role: Role, words: str, timeout: float) -> None:
        self.role, self.timeout, variable = role, timeout, f"KVEXP_{role.upper()}_TOKEN"
        self.token = os.environ.get(variable, "")
        try:
            url = httpx.URL(words)
            named = dict(url.params)
        except httpx.InvalidURL as error:
            raise ConfigError(f"{role}={words}: {error}; give it as http://HOST:PORT") from None
        if url.userinfo:
            raise ConfigError(f"{role}: a URL with a password is written into reports; give it in {variable}")
        if url.scheme not in ("http", "https") or not url.host or set(named) - {"model"} or url.fragment:
            raise ConfigError(f"{role} must be {NAMED}, got {words}")
        if self.token and url.scheme == "http" and not _is_local(url.host):
            raise ConfigError(
                f"{role}: {variable} would go to {url.host} in clear text; give an https:// URL or unset it"
            )
        self.model: str | None = named.get("model")
        self.url = str(url.copy_with(query=None)).rstrip("/")
        # OpenAI's paths lie under /v1, or under what the URL ends in (OpenVINO Model Server: /v3).
        self.api = self.url if self.url.rpartition("/")[2] in ("v1", "v2", "v3") else f"{self.url}/v1"
        self.root = self.api.rpartition("/")[0]
        headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {self.token}"} if self.token else {})}
        self.client = httpx.Client(
            headers=headers,
            timeout=timeout,
            verify=ssl.create_default_context(),
            trust_env=False,
            follow_redirects=False,
        )

    def ask(self, url: str, body: Mapping[str, Any] | None = None) -> Json:
        """The reply as a JSON object. SideError where none comes after a few tries, or it holds an error."""
        for pause in PAUSES_S:
            with suppress(_Again):
                return self._once(url, body)
            time.sleep(pause)
        try:
            return self._once(url, body)
        except _Again as error:
            raise self.error(url, f"{error} (tried {len(PAUSES_S) + 1} times)") from None

    def _once(self, url: str, body: Mapping[str, Any] | None) -> Json:
        end, data = time.monotonic() + self.timeout, bytearray()
        late = f"no whole reply within {self.timeout:g} s; timeout= gives it longer"
        try:
            with self.client.stream("GET" if body is None else "POST", url, json=body) as reply:
                for chunk in reply.iter_bytes():
                    data += chunk
                    if len(data) > MOST:
                        raise self.error(url, f"sent more than {size(MOST)}")
                    if time.monotonic() > end:
                        raise self.error(url, late)
        except httpx.TimeoutException:
            raise self.error(url, late) from None
        except httpx.HTTPError as error:  # refused and reset connections, replies that were cut off
            raise _Again(str(error) or type(error).__name__) from None
        if reply.is_redirect:
            raise self.error(url, f"redirects to {reply.headers.get('location')}, which is not followed")
        if reply.is_error:
            message = f"{reply.status_code} {reply.reason_phrase}: {_message(bytes(data))}"
            if reply.is_server_error or reply.status_code == 429:
                raise _Again(message)
            raise self.error(url, message)
        try:
            value = parse(bytes(data))
        except ValueError as error:
            raise _Again(f"sent no JSON: {error}") from None
        if value.get("error"):
            raise self.error(url, _message(bytes(data)))
        return value

    def error(self, url: str, why: str) -> SideError:
        """What to raise; the credential never stands in it."""
        words = f"{self.role}: {url}: {' '.join(why.split())}"
        return SideError(words.replace(self.token, "***") if self.token else words)

    def field(self, url: str, value: Any, *path: str | int) -> Any:
        """What a reply holds at a path of keys and places; SideError where it holds nothing there."""
        for key in path:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                where = ".".join(map(str, path))
                raise self.error(url, f"sent a reply without {where}") from None
        return value


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _message(data: bytes) -> str:
    """A server's own words on an error, as far as they are known to be words."""
    try:
        error: Any = parse(data)
        error = error.get("error", error)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except ValueError:
        text = data.decode(errors="replace")
    return text[:SAID]


class Served(Side):
    """Common ground of the servers. card: the model's entry of /v1/models; build: of the server, as it says."""

    kind: str
    note = "prefix cache as the server has it"

    def __init__(self, connection: Connection, card: Json, context: Any, build: str = "") -> None:
        self.connection, self.role, self.card, self.build = connection, connection.role, card, build
        self.model, self.context = str(card.get("id")), int(context) if context else None
        self.name = " ".join(filter(None, (self.kind, build, self.model, f"at {connection.url}")))

    def identity(self) -> Json:
        volatile = {"created", "permission"}
        card = {key: value for key, value in self.card.items() if key not in volatile}
        return {"kind": self.kind, "url": self.connection.url, "build": self.build, "model": card}

    def places(self, prompt: Sequence[Token], text: Sequence[Token], top: int | None) -> Iterator[Place]:
        for count in range(len(text)):
            yield self.place([*prompt, *text[:count]], top)

    def place(self, tokens: Sequence[Token], top: int | None) -> Place:
        """Distribution behind the tokens."""
        raise NotImplementedError

    def check_count(self, url: str, place: Place, top: int | None, most: int | None = None) -> Place:
        """The place, if it has as many tokens as were asked for; most: tokens of the vocabulary, if they are known."""
        count = len(place.tokens)
        # Different tokens of one text, such as pieces of a letter, come as one.
        if place.whole if top is None else count >= min(top, most or top) - self.by_text * (top // 2):
            return place
        wanted = "all log-probabilities" if top is None else f"{top} log-probabilities"
        raise self.connection.error(url, f"was asked for {wanted} and sent {count}; top={count} asks for no more")


class LlamaServer(Served):
    """llama.cpp's llama-server. Source: ggml-org/llama.cpp, tools/server/README.md, as of xllamacpp 2026.10.11549."""

    kind = "llama-server"
    note = "cache_prompt=true"

    def __init__(self, connection: Connection, card: Json) -> None:
        url = f"{connection.root}/props"
        props, field = connection.ask(url), connection.field
        context = field(url, props, "default_generation_settings", "n_ctx")
        super().__init__(connection, card, context, str(props.get("build_info", "")))
        self.vocabulary = int(field(f"{connection.api}/models", card, "meta", "n_vocab"))

    def tokenize(self, prompt: Prompt) -> list[Token]:
        ask, root, text = self.connection.ask, self.connection.root, prompt.text
        if prompt.messages:
            url = f"{root}/apply-template"
            text = str(self.connection.field(url, ask(url, {"messages": list(prompt.messages)}), "prompt"))
        url = f"{root}/tokenize"
        reply = ask(url, {"content": text, "add_special": True, "parse_special": True})
        return list(self.connection.field(url, reply, "tokens"))

    def _complete(self, tokens: Sequence[Token], **options: Any) -> tuple[str, Json]:
        url = f"{self.connection.root}/completion"
        body = {"prompt": list(tokens), "cache_prompt": True, "samplers": ["temperature"], **GREEDY, **options}
        return url, self.connection.ask(url, body)

    def answer(self, prompt: Sequence[Token], new: int) -> Answer:
        url, reply = self._complete(prompt, n_predict=new, return_tokens=True)
        tokens, text = (self.connection.field(url, reply, key) for key in ("tokens", "content"))
        return Answer(list(tokens), str(text), reply.get("stop_type") != "limit")

    def place(self, tokens: Sequence[Token], top: int | None) -> Place:
        url, reply = self._complete(tokens, n_predict=1, n_probs=self.vocabulary if top is None else top)
        field = self.connection.field
        entries = field(url, reply, "completion_probabilities", 0, "top_logprobs")
        ids, logprobs = ([field(url, entry, key) for entry in entries] for key in ("id", "logprob"))
        return self.check_count(url, Place.of(self.role, ids, logprobs), top, self.vocabulary)


class OpenAI(Served):
    """A server of which nothing is known but OpenAI's completions: it is fed texts, and gives the likeliest few tokens.

    Its reply has token texts in `logprobs` as OpenAI's legacy completions, or as its chat completions (llama-server's).
    """

    kind, by_text = "OpenAI API", True

    def __init__(self, connection: Connection, card: Json, build: str = "") -> None:
        super().__init__(connection, card, card.get("max_model_len"), build)

    def tokenize(self, prompt: Prompt) -> list[Token]:
        if prompt.messages:
            raise ConfigError(
                f"{self.role}: {self.name} has no endpoint that applies its chat template: give prompts as texts, in "
                "the template"
            )
        return [prompt.text]

    def _complete(self, tokens: Sequence[Token], **options: Any) -> tuple[str, Json, Any]:
        url = f"{self.connection.api}/completions"
        prompt = "".join(map(str, tokens)) if self.by_text else list(tokens)
        reply = self.connection.ask(url, {"model": self.model, "prompt": prompt, **GREEDY, **options})
        return url, reply, self.connection.field(url, reply, "choices", 0)

    def answer(self, prompt: Sequence[Token], new: int) -> Answer:
        url, reply, choice = self._complete(prompt, max_tokens=new, logprobs=1)
        tokens: list[Token] = [token for token, *_ in self._entries(url, choice)]
        count = (reply.get("usage") or {}).get("prompt_tokens")
        return Answer(tokens, str(choice.get("text", "")), choice.get("finish_reason") != "length", count)

    def place(self, tokens: Sequence[Token], top: int | None) -> Place:
        url, _, choice = self._complete(tokens, max_tokens=1, logprobs=top or FEW)
        entries = self._entries(url, choice)
        if not entries:
            raise self.connection.error(url, f"was asked for {top or FEW} log-probabilities and sent none")
        token, logprob, listed = entries[0]
        listed = listed or {token: logprob}
        place = Place.of(self.role, list(listed), list(listed.values()))
        return self.check_count(url, place, top or FEW)

    def _entries(self, url: str, choice: Json) -> list[tuple[str, Any, dict[str, Any]]]:
        """(token, log-probability, the likeliest tokens' log-probabilities) of each generated token."""
        logprobs, field = choice.get("logprobs") or {}, self.connection.field
        if "content" in logprobs:
            return [
                (
                    *(field(url, entry, key) for key in ("token", "logprob")),
                    {item["token"]: item["logprob"] for item in reversed(entry.get("top_logprobs") or [])},
                )
                for entry in logprobs["content"]
            ]
        tokens, values = (field(url, logprobs, key) for key in ("tokens", "token_logprobs"))
        return list(zip(tokens, values, logprobs.get("top_logprobs") or [{}] * len(tokens), strict=False))


class VLLM(OpenAI):
    """vLLM's server, fed token ids. Source: vllm-project/vllm 0.32.0, entrypoints/openai/completion/protocol.py."""

    kind, by_text = "vLLM", False

    def __init__(self, connection: Connection, card: Json) -> None:
        super().__init__(connection, card, str(connection.ask(f"{connection.root}/version").get("version", "")))

    def tokenize(self, prompt: Prompt) -> list[Token]:
        url = f"{self.connection.root}/tokenize"
        text = {"messages": list(prompt.messages)} if prompt.messages else {"prompt": prompt.text}
        return list(self.connection.field(url, self.connection.ask(url, {"model": self.model, **text}), "tokens"))

    def answer(self, prompt: Sequence[Token], new: int) -> Answer:
        url, _, choice = self._complete(prompt, max_tokens=new, return_token_ids=True)
        tokens = list(self.connection.field(url, choice, "token_ids"))
        return Answer(tokens, str(choice.get("text", "")), choice.get("finish_reason") != "length")

    def place(self, tokens: Sequence[Token], top: int | None) -> Place:
        options = {"logprobs": -1 if top is None else top, "return_tokens_as_token_ids": True}
        url, _, choice = self._complete(tokens, max_tokens=1, **options)
        listed = self.connection.field(url, choice, "logprobs", "top_logprobs", 0)
        try:
            ids = [int(name.removeprefix("token_id:")) for name in listed]
        except (ValueError, AttributeError):
            raise self.connection.error(url, "sent token texts where ids were asked for") from None
        return self.check_count(url, Place.of(self.role, ids, list(listed.values())), top)


KINDS = {"llamacpp": LlamaServer, "vllm": VLLM}  # by what /v1/models says of its owner


def served(role: Role, words: str, timeout: float, stack: ExitStack) -> Served:
    """The server at a URL, as the kind that it says it is; the stack closes the connection.

    ConfigError for a wrong URL, SideError where no server answers.
    """
    connection = Connection(role, words, timeout)
    stack.enter_context(connection.client)
    url = f"{connection.api}/models"
    cards = connection.field(url, connection.ask(url), "data")
    names = [str(card.get("id")) for card in cards]
    wanted = connection.model or (names[0] if len(names) == 1 else None)
    if wanted not in names:
        problem = f"serves {', '.join(names) or 'no model'}"
        raise ConfigError(f"{role}: {connection.url} {problem}: add ?model=NAME to the URL")
    card = cards[names.index(wanted)]
    return KINDS.get(str(card.get("owned_by")), OpenAI)(connection, card)


def as_texts(side: Side) -> Side:
    """A server as one that is fed texts, to be compared with another of those."""
    if isinstance(side, Served):
        return OpenAI(side.connection, side.card)
    raise ConfigError(
        f"{side.role}: {side.name} is fed token ids, and the other model texts: give both as servers with OpenAI's API"
    )
