"""kvexp as a model of lm-eval, and the command `kvexp lm-eval`. Importing this module needs lm-eval.

`--model_args` are in the words of `kvexp run`: pretrained=…,method=keyformer,kv_ratio=0.5,method.recent_ratio=0.2,…

The command is lm-eval's own with two options added: --data_dir FOLDER reads local files NAME.SPLIT.jsonl in place of
the hub's data, and --fewshot_split SPLIT says where examples are drawn. What is wrong with the model's arguments or
the tasks is said before the model loads, which lm-eval by itself does first.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import logging
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import yaml
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook, TemplateLM
from lm_eval.api.registry import register_model

from kvexp.core import Budget, CacheConfig, Method
from kvexp.hf import chat_template, cpu_linear, load_model, load_tokenizer
from kvexp.hf.chat_template import Thinking
from kvexp.hf.load import check_source, one_row_per_forward
from kvexp.hf.moving_rope import MovingRope
from kvexp.lm_eval import Ask, NothingToJudge, Scorer, check_row_mask, padded
from kvexp.run.build import build_budget, build_cache, build_method
from kvexp.run.compose import option, options
from kvexp.run.user_code import admitted
from kvexp.tasks.lm_eval import Protocol, protocol_of
from kvexp.util.errors import CacheError, ConfigError
from kvexp.util.fields import typed
from kvexp.util.output import say

# Words of `KvexpLM` itself: about the model, and about the measurement.
LOADING = (
    *("pretrained", "tokenizer", "dtype", "device", "device_map", "revision", "trust_remote_code", "allow_pickle"),
    *("pack_linear", "seed", "batch_size", "max_batch_size"),
    *("chat_template_args", "enable_thinking", "think_end_token"),
)
FILES = {"calibration": "statistics of the model's queries", "surrogate": "a trained surrogate"}
CACHE_GROUPS = ("method", "budget", "cache", "select", "score")
NO_CACHE = {
    "use_cache": (
        "--use_cache keeps answers by the words of a request alone, so that another model, method or budget would be "
        "answered from them: leave it out; kvexp run task=lm_eval keeps its rows by all of these and goes on where it "
        "stopped"
    ),
    "cache_requests": (
        "--cache_requests keeps prompts by a task's name and tokenizer's, so that other data, of --data_dir say, would "
        "be asked with them: leave it out"
    ),
}
OWN = {"method": "full", "kv_ratio": None, "protocol": "prefill_then_step"}


def method_of(name: Any, settings: Mapping[str, Any]) -> Method:
    """The method of this name with its own defaults, but for `settings`; a Method itself, as given in Python.

    A user's method has the option under which it was admitted (`kvexp.run.user_code`): nothing is loaded here.
    """
    if isinstance(name, Method):
        if settings:
            raise ConfigError(f"method is a {type(name).__name__} already: give it its settings, not as method.NAME")
        return name
    users = {method.option: method for method in admitted("method").values()}
    if name not in options("method") and name not in users:
        raise ConfigError(
            f"method must be one of {', '.join(options('method'))}, or a class of yours, named in --model_args as "
            f"method=FILE.py or method=MODULE.CLASS, got {name!r}"
        )
    node = {"_target_": users[name].target} if name in users else option("method", name)
    return build_method({**node, **settings})


def budget_of(method: Method, kv_ratio: Any, settings: Mapping[str, Any]) -> Budget | None:
    """The budget of a method that evicts; kv_ratio, or tokens or a threshold among the settings."""
    if not method.evicts:
        return None
    if kv_ratio is None and settings.get("tokens") is None and settings.get("threshold") is None:
        raise ConfigError(
            f"method={method.name} needs a budget: give kv_ratio=RATIO, budget.tokens=NUMBER or budget.threshold=NUMBER"
        )
    ratio = {} if kv_ratio is None else {"kv_ratio": kv_ratio}
    return build_budget({"_target_": "kvexp.core.Budget", **ratio, **settings})


@dataclass(frozen=True)
class ModelArguments:
    """The cache and the protocol that `--model_args` ask for, checked without a model."""

    cache: CacheConfig
    protocol: Protocol

    @classmethod
    def of(cls, method: Any, kv_ratio: Any, protocol: Any, settings: Mapping[str, Any]) -> ModelArguments:
        """settings: as `parted` takes them. ConfigError for any that is wrong."""
        groups = parted(settings)
        chosen = method_of(method, groups["method"])
        missing = [name for name in FILES if getattr(chosen.needs, name, False)]  # what declares none: see CacheConfig
        if missing:
            raise ConfigError(
                f"method={chosen.name} needs {FILES[missing[0]]}, which --model_args cannot give: use "
                f"kvexp run task=lm_eval method={chosen.name}, or another method"
            )
        if groups["budget"].get("heads") == "duo":
            raise ConfigError(
                "budget.heads=duo needs scores of the model's heads, which --model_args cannot give: use kvexp run "
                "task=lm_eval budget.heads=duo, or another way to share slots out"
            )
        budget = budget_of(chosen, kv_ratio, groups["budget"])
        cache = build_cache(chosen, budget, groups["cache"], select=groups["select"], score=groups["score"])
        how = protocol_of(typed(protocol, str, "protocol"), **groups["protocol"])
        if how.mode == "row_mask":
            check_row_mask(cache, how.mask)
        return cls(cache, how)


def check_arguments(given: Mapping[str, Any]) -> None:
    """ConfigError for anything wrong with `--model_args`, before a model loads."""
    settings = {key: value for key, value in given.items() if key not in LOADING}
    if not isinstance(given.get("pretrained"), str):
        raise ConfigError("model_args: pretrained=FOLDER (or a hub id) is missing")
    values = {key: settings.pop(key, default) for key, default in OWN.items()}
    ModelArguments.of(values["method"], values["kv_ratio"], values["protocol"], settings)
    trusted = (bool(given.get(key, False)) for key in ("allow_pickle", "trust_remote_code"))
    check_source(given["pretrained"], *trusted)


def parted(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings GROUP.x of CACHE_GROUPS and the protocol's switches, by group; ConfigError for any other word."""
    groups: dict[str, dict[str, Any]] = {group: {} for group in (*CACHE_GROUPS, "protocol")}
    switches = {field.name for field in fields(Protocol)} - {"mode", "fewshot_split", "fewshot_excludes_item"}
    for key, value in given.items():
        group, _, name = key.partition(".")
        if name and group in CACHE_GROUPS:
            groups[group][name] = value
        elif key in switches:
            groups["protocol"][key] = value
        else:
            known = ("pretrained", *OWN, *LOADING[1:], *(f"{group}.NAME" for group in CACHE_GROUPS), *sorted(switches))
            raise ConfigError(f"model_args: {key} is not known; there are {', '.join(known)}")
    return groups


AGAIN = 1 << 24  # added to an item's seed for each further answer to it: more than there are items


@register_model("kvexp")
class KvexpLM(TemplateLM):  # type: ignore[misc]
    """A causal LM under an eviction method.

    pretrained: a folder, a hub id, or a model that kvexp has loaded (then with its tokenizer). The other arguments are
    run.py's: method, kv_ratio, protocol and its switches, method.recent_ratio, budget.tokens, cache.evict_every and so
    on, seed, dtype, device. The numbers equal `run.py task=lm_eval` with the same settings: an item's noise depends on
    seed + its number in its task. chat_template_args, enable_thinking, think_end_token: as of lm-eval's own hf
    model; where its template is applied, answers go without their thinking by the template's own tags too.
    batch_size: rows per forward (one in half precision on a CPU), of no effect on any number but in half precision on
    a GPU. unanswered: requests of all models that could not be judged, which count as wrong; `kvexp lm-eval` then fails
    at its end.
    """

    unanswered: ClassVar[list[str]] = []

    def __init__(
        self,
        pretrained: Any,
        method: str = "full",
        kv_ratio: float | None = None,
        protocol: str = "prefill_then_step",
        *,
        seed: int = 0,
        tokenizer: Any = None,
        dtype: str = "float32",
        device: str | None = None,
        device_map: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        allow_pickle: bool = False,
        pack_linear: bool = True,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        parsed = ModelArguments.of(method, kv_ratio, protocol, settings)
        if not str(batch_size or 1).isdigit() or int(batch_size or 1) < 1:
            raise ConfigError(f"batch_size must be a number of rows, at least 1, got {batch_size!r}")
        if isinstance(pretrained, str):
            hub: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
            place: dict[str, Any] = {"device_map": device_map} if device_map else {"device": device}
            tokenizer = load_tokenizer(tokenizer or pretrained, **hub)
            pretrained = load_model(pretrained, dtype=dtype, allow_pickle=allow_pickle, **hub, **place)
            if pack_linear:
                cpu_linear.pack_linear(pretrained)
        elif tokenizer is None:
            raise ConfigError("a model that is loaded already needs tokenizer=")
        given = dict(chat_template_args or {})
        given |= {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        if given:
            chat_template.check_arguments(tokenizer, given, "chat_template_args")
        self.seed, self.tokenizer = seed, chat_template.with_arguments(tokenizer, given)
        self.think_end = None if think_end_token is None else _end_of(think_end_token, tokenizer)
        weight = pretrained.get_input_embeddings().weight
        by_itself = one_row_per_forward(str(weight.dtype).removeprefix("torch."), weight.device.type)
        by_itself |= MovingRope.of(pretrained.config) is not None
        how, rows = parsed.protocol, 1 if by_itself else int(batch_size or 1)
        thinking = None if self.think_end is None else Thinking.ending(self.think_end)
        self.scorer = Scorer(pretrained, tokenizer, parsed.cache, how, rows, thinking)

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Always a ConfigError: an lm-eval cache came by another way than the command line, which refuses it before."""
        raise ConfigError(NO_CACHE["use_cache"])

    @property
    def eot_token_id(self) -> int:
        token: int = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        return self.scorer.encoder.start()

    @property
    def max_length(self) -> int:
        return self.scorer.holds

    @property
    def tokenizer_name(self) -> str:
        name: str = self.tokenizer.name_or_path
        return name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.scorer.encoder.text(string, add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """lm-eval's messages through the tokenizer's template."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError("--apply_chat_template, but this tokenizer has no chat template")
        if self.think_end is None:
            self.scorer = replace(self.scorer, thinking=self._thinking)
        ends = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        if any(turn["role"] == "system" for turn in chat_history):
            chat_template.check_heard(self.tokenizer, chat_history, "leave out --system_instruction", **ends)
        return chat_template.render(self.tokenizer, chat_history, **ends)

    @functools.cached_property
    def _thinking(self) -> Thinking | None:
        """The tags of the tokenizer's template."""
        return chat_template.thinking_of(self.tokenizer)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-probability, greedy) per request. Requests of one item share what they have in common."""
        asks, places = list[Ask](), list[int]()
        results: list[tuple[float, bool]] = [(-math.inf, False)] * len(requests)
        for place, request in enumerate(requests):
            try:
                asks.append(self._ask(request, place))
                places.append(place)
            except NothingToJudge as error:  # costs its row, not what has been and will be answered
                self.unanswered.append(f"{request.task_name}, document {request.doc_id}: {error}")
                say(f"error: counts as wrong: {self.unanswered[-1]}", file=sys.stderr)
        tasks: dict[Any, list[int]] = defaultdict(list)
        for index, place in enumerate(places):
            tasks[requests[place].task_name].append(index)
        how = self.scorer.protocol
        if how.budget_length == "padded":
            for indices in tasks.values():
                padded_asks = padded([asks[index] for index in indices], how.padded_batch, how.whole_text)
                for index, ask in zip(indices, padded_asks, strict=True):
                    asks[index] = ask
        left = iter(places)
        for chunk in _items(asks, self.scorer.batch_size):
            for place, judged in zip(itertools.islice(left, len(chunk)), self.scorer.measure(chunk), strict=True):
                results[place] = self.scorer.result(judged)
        return results

    def _ask(self, request: Instance, place: int) -> Ask:
        context, continuation = request.args[:2]
        group = place if request.doc_id is None else (request.task_name, request.doc_id)
        ask = self.scorer.ask(context, "", continuation, group=group, seed=self._seed(request))
        if ask is None:
            raise NothingToJudge(f"the model holds {self.max_length} tokens, too few for {continuation[:40]!r}")
        return ask

    def _seed(self, request: Instance) -> int:
        return self.seed + (request.doc_id or 0)

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        """Results for callers that bring token ids themselves: [(texts, context ids, continuation ids)]."""
        asks = [Ask(tuple(context), tuple(continuation), seed=self.seed) for _, context, continuation in requests]
        return [self.scorer.result(judged) for judged in self.scorer.measure(asks)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in windows of the model's length."""
        totals = []
        for request in requests:
            windows = self.scorer.windows(request.args[0], seed=self._seed(request))
            totals.append(sum(judged.total for judged in self.scorer.measure(windows)))
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts. A request that comes again (lm-eval's repeats) samples anew."""
        texts, again = [], Counter[Any]()
        for start in range(0, len(requests), self.scorer.batch_size):
            for _, alike in groupby(requests[start : start + self.scorer.batch_size], key=lambda r: r.args[1]):
                group, seeds = list(alike), []  # of equal generation_kwargs
                for request in group:
                    key = (request.task_name, request.doc_id, request.idx)
                    seeds.append(self._seed(request) + again[key] * AGAIN)
                    again[key] += 1
                contexts = [self._prompt(request) for request in group]
                texts += self.scorer.generate(contexts, [[]] * len(group), group[0].args[1], seeds)[0]
        return texts

    def _prompt(self, request: Instance) -> list[int]:
        ids, _, _ = self.scorer.prompt(request.args[0], "", request.args[1])
        if not ids:
            raise ConfigError(f"max_gen_toks leaves no room for a prompt: the model holds {self.max_length} tokens")
        return ids


def _end_of(token: str | int, tokenizer: Any) -> str:
    """The text of lm-eval's think_end_token, a text or a token id."""
    return str(tokenizer.decode([int(token)])) if str(token).isdigit() else str(token)


def _items(asks: list[Ask], size: int) -> list[list[Ask]]:
    """Neighbouring asks of `size` items at a time."""
    items = [list(members) for _, members in groupby(asks, key=lambda ask: ask.group)]
    return [list(chain(*items[start : start + size])) for start in range(0, len(items), size)]


def main(argv: list[str]) -> int:
    """`kvexp lm-eval`: lm-eval's own command line with the model kvexp; exit code 1 and a message for an error."""
    try:
        run_lm_eval(argv)
    except (ConfigError, CacheError) as error:
        say(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run_lm_eval(arguments: list[str]) -> None:
    """Run lm-eval with these arguments."""
    from kvexp.tasks import lm_eval as package

    package.require()
    from lm_eval.__main__ import cli_evaluate

    import kvexp.run.lm_eval_model  # noqa: F401  # registers the model

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--data_dir")
    parser.add_argument("--fewshot_split")
    mine, rest = parser.parse_known_args(arguments)
    theirs = _read(rest)
    with contextlib.ExitStack() as stack:
        _check_caches(theirs, rest)
        if theirs.tasks:
            given = _merged(theirs.model_args)
            if theirs.model == "kvexp":
                rest = _check_model(given, theirs.model_args, rest)
            folder = Path(stack.enter_context(TemporaryDirectory()))
            changed = _check_tasks(theirs, mine, folder, given)
            if changed:
                rest += ["--include_path", str(folder)]
                logging.getLogger("lm_eval.tasks._index").setLevel(logging.ERROR)  # it would warn of each file
            if theirs.device is None:
                import torch

                rest += ["--device", "cuda:0" if torch.cuda.is_available() else "cpu"]
        sys.argv = [sys.argv[0], *rest]
        KvexpLM.unanswered.clear()
        cli_evaluate()
    if failed := KvexpLM.unanswered:
        raise ConfigError(
            f"{len(failed)} requests could not be judged and count as wrong in the numbers above (kvexp run "
            f"task=lm_eval leaves their rows out): {'; '.join(failed[:3])}"
        )


def _read(rest: list[str]) -> argparse.Namespace:
    """The options of lm-eval that are looked at here."""
    seen = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    seen.add_argument("--model", "-M")
    seen.add_argument("--model_args", "-a", nargs="+", default=[])
    seen.add_argument("--tasks", "-t", nargs="+", default=[])
    seen.add_argument("--num_fewshot", "-f", type=int)
    seen.add_argument("--include_path")
    seen.add_argument("--device")
    seen.add_argument("--config", "-C")
    seen.add_argument("--use_cache", "-c")
    seen.add_argument("--cache_requests", nargs="?", const="true")
    known, _ = seen.parse_known_args(rest)
    return known


def _check_caches(theirs: argparse.Namespace, words: Sequence[str]) -> None:
    """ConfigError for a cache of lm-eval's with the model kvexp, also by shortened words and in a --config file."""
    filed: Any = {}
    if theirs.config is not None and Path(theirs.config).is_file():
        filed = yaml.safe_load(Path(theirs.config).read_text("utf-8"))
    filed = filed if isinstance(filed, dict) else {}
    keys = [word.partition("=")[0] for word in words]
    for name, why in NO_CACHE.items():
        shortened = any(len(key) > 3 and f"--{name}".startswith(key) for key in keys)
        typed = getattr(theirs, name) is not None or shortened or filed.get(name)
        if typed and "kvexp" in (theirs.model, filed.get("model")):
            raise ConfigError(why)


def _merged(words: Sequence[str]) -> dict[str, Any]:
    """The values of --model_args as lm-eval reads them: JSON objects, or key=value."""
    from lm_eval.utils import simple_parse_args_string

    given: dict[str, Any] = {}
    for word in words:
        try:
            given |= json.loads(word) if word.startswith("{") else simple_parse_args_string(word)
        except (ValueError, SyntaxError) as error:
            raise ConfigError(
                f"--model_args: cannot read {word!r} ({error}): give key=value, or one JSON object"
            ) from error
    return given


def _check_model(given: dict[str, Any], arguments: Sequence[str], rest: list[str]) -> list[str]:
    """ConfigError for wrong `--model_args`; returns the command line with a user's method by its option.

    The code of a user's method is loaded for that, since somebody has typed its name.
    """
    from kvexp.run.user_code import admit, load_class

    typed = given.get("method")
    method = load_class("method", typed) if isinstance(typed, str) else None
    if method is not None:
        given["method"] = admit(method).option
        named = re.compile(rf"(\bmethod(?:=|\"\s*:\s*\")){re.escape(str(typed))}(?![\w.:])")
        rest = [named.sub(rf"\g<1>{method.option}", word) if word in arguments else word for word in rest]
    check_arguments(given)
    return rest


def _check_tasks(theirs: argparse.Namespace, mine: argparse.Namespace, folder: Path, given: Mapping[str, Any]) -> bool:
    """Load every task that is named, groups and tasks that make their rows left out; write the definitions that are
    changed. given: the model's arguments. Returns whether any was written.
    """
    from kvexp.tasks import lm_eval as definition

    local = mine.data_dir is not None or mine.fewshot_split is not None
    if theirs.include_path is not None:
        if local:
            raise ConfigError("--data_dir and --fewshot_split cannot be combined with --include_path")
        return False
    seen: set[str] = set()
    for wanted in ",".join(theirs.tasks).split(","):
        pattern = bool(set("*?[") & set(wanted))
        names = definition.matching(wanted) if pattern else definition.names_of(wanted)
        for name in names:
            if theirs.model == "kvexp":
                definition.check_feels_eviction(name, given.get("protocol", OWN["protocol"]))
            config = definition.config_of(name)
            if pattern or name in seen or definition.makes_rows(config) or not (local or names == [wanted]):
                continue
            seen.add(name)
            where = {"data_dir": mine.data_dir, "fewshot_split": mine.fewshot_split}
            definition.load(name, shots=theirs.num_fewshot, **where)
            if local:
                shots = config.get("num_fewshot") if theirs.num_fewshot is None else theirs.num_fewshot
                definition.task_file(folder, name, shots=shots or 0, **where)
    return local and bool(seen)
