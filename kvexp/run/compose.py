"""What a command line of `kvexp run` may say: settings, what a mistake was meant to be, a user's classes."""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import omegaconf._utils
import yaml
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvexp.run.user_code import BASES, AdmittedClass, admit, admitted, load_class, settings_of_class
from kvexp.util.errors import REMARKS, ConfigError, nearest
from kvexp.util.files import CONF
from kvexp.util.output import say

# -- the settings there are: conf/ -------------------------------------------------------------------------------------

GLOBAL = "# @package _global_"  # the first line of an option whose keys are the root's
PAIRS = ("model_task", "protocol_task")  # groups whose options are of two others, and whose keys are the root's
OF_THE_ROOT = (*PAIRS, "experiment")  # listed groups whose options set keys of the root
LISTED = ("method", "model", "task", *OF_THE_ROOT)  # groups whose options stand together in one file
SUGGESTIONS = 4


@functools.cache
def defaults() -> dict[str, Any]:
    """Group -> the option that conf/config.yaml takes, None where it takes none."""
    lists = [entry for entry in _read(CONF / "config.yaml")["defaults"] if isinstance(entry, dict)]
    named = {words.split(" ")[-1]: option for entry in lists for words, option in entry.items()}
    return {group: option for group, option in named.items() if not group.startswith("hydra/")}


@functools.cache
def root_values() -> dict[str, Any]:
    """The values conf/config.yaml gives the keys at the root, unresolved."""
    return {key: value for key, value in _read(CONF / "config.yaml").items() if key not in ("defaults", "hydra")}


def roots() -> set[str]:
    """The keys that may stand at the root of a configuration."""
    return {*root_values(), *defaults()}


def options(group: str) -> list[str]:
    """The names of a group's options, without users' methods."""
    return sorted({path.stem for path in (CONF / group).glob("*.yaml")} | listed(group).keys())


@functools.cache
def option(group: str, name: str) -> dict[str, Any]:
    """Settings of an option within its group; none where there is no such option, or it sets keys of the root."""
    file = CONF / group / f"{name}.yaml"
    if name in listed(group):
        return {} if group in OF_THE_ROOT else listed(group)[name]
    if "/" in name or not file.is_file() or file.read_text(encoding="utf-8").startswith(GLOBAL):
        return {}
    node = _read(file)
    bases = [option(group, base) for base in node.pop("defaults", []) if base != "_self_"]
    return functools.reduce(operator.or_, [*bases, node])


@functools.cache
def listed(group: str) -> dict[str, dict[str, Any]]:
    """Name -> settings, of a group's options that stand together in one file of conf/."""
    if group == "task":
        from kvexp.tasks import defaults_of

        return {name: defaults_of(node["_target_"]) | node for name, node in _read(CONF / "tasks.yaml").items()}
    if group == "model":
        models = _read(CONF / "models.yaml")
        pretrained = models.pop("_pretrained")
        return {name: node if "kind" in node else pretrained | node for name, node in models.items()}
    if group == "method":  # made of the classes
        return _read(CONF / "methods.yaml")
    if group == "experiment":  # made of the exhibits, which are no part of this package
        experiments: dict[str, dict[str, Any]] = json.loads((CONF / "experiments.json").read_text(encoding="utf-8"))
        return experiments
    return _read(CONF / "pairs.yaml")[group] if group in PAIRS else {}


class _Unmade(dict[str, Any]):
    """Settings of an option as a dict, an OmegaConf node only when Hydra copies it: to make all takes half a second."""

    def __deepcopy__(self, memo: Any) -> Any:
        return OmegaConf.create(dict(self))


class _Stored(ConfigNode):
    """An option in Hydra's store. Nobody changes it, so copies of the store, of which Hydra makes many, share it."""

    def __deepcopy__(self, memo: Any) -> _Stored:
        return self


def _store_listed() -> None:
    """Make what is listed options of their groups, as a user's method becomes one when it is named."""
    for group in LISTED:
        package = "_global_" if group in OF_THE_ROOT else None
        for path, node in listed(group).items():
            *folders, name = f"{group}/{path}.yaml".split("/")
            place = ConfigStore.instance().repo
            for folder in folders:
                place = place.setdefault(folder, {})
            place[name] = _Stored(name, _Unmade(node), "/".join(folders), package, "kvexp")  # type: ignore[arg-type]


def settings() -> dict[str, tuple[str, ...]]:
    """Dotted key -> the options of its group that have it, none for a key of conf/config.yaml."""
    options_by_key: dict[str, tuple[str, ...]] = dict.fromkeys(_leaves(root_values()), ())
    nodes = [(group, name, option(group, name)) for group in defaults() for name in options(group)]
    nodes += [(users.group, users.option, settings_of_class(users.cls)) for users in admitted().values()]
    for group, name, node in nodes:
        for key in _leaves(node, f"{group}."):
            options_by_key[key] = (*options_by_key.get(key, ()), name)
    return options_by_key


def check_keys(config: Mapping[str, Any]) -> None:
    """ConfigError for a key that nothing reads. Groups that are built into objects know their own fields."""
    log = config.get("log")
    known = {key for name in options("log") for key in option("log", name)}
    wrong = [key for key in config if key not in roots()]
    wrong += [f"log.{key}" for key in (log if isinstance(log, Mapping) else ()) if key not in known]
    if wrong:
        raise ConfigError(unknown(str(wrong[0]), {}))


def _leaves(node: Mapping[str, Any], place: str = "") -> Iterator[str]:
    for key, value in node.items():
        if key not in ("_target_", "defaults"):
            yield f"{place}{key}"
            if isinstance(value, Mapping):
                yield from _leaves(value, f"{place}{key}.")


def _read(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        plain: Any = YAML(file).get_single_data()
    return plain or {}


def _yaml_loader() -> Any:
    """OmegaConf's loader of YAML, on libyaml's parser where PyYAML has it: in a tenth of the time."""
    rules = omegaconf._utils.get_yaml_loader()
    if not yaml.__with_libyaml__:
        return rules

    class Loader(yaml.cyaml.CParser, rules):  # type: ignore[misc,valid-type]
        def __init__(self, stream: Any) -> None:
            yaml.cyaml.CParser.__init__(self, stream)
            yaml.constructor.SafeConstructor.__init__(self)
            yaml.resolver.Resolver.__init__(self)

    return Loader


YAML = _yaml_loader()
omegaconf._utils.get_yaml_loader = lambda: YAML  # which OmegaConf, and thereby Hydra, asks for with every file


# -- what Hydra refuses to compose: what was typed, and what was probably meant ----------------------------------------

FULL_ERROR = "HYDRA_FULL_ERROR"  # Hydra's own switch: set, errors keep their tracebacks


def split_model_words(words: Sequence[str], known: Mapping[str, str], takes: str) -> tuple[list[str], dict[str, str]]:
    """Split a command's words KEY=VALUE into those that choose a model and the values of its own settings.

    known: the own settings with their defaults. ConfigError for any other word, which lists what there is; takes: how
    that sentence begins.
    """
    values, model_words = dict(known), list[str]()
    for word in words:
        key, equals, value = word.partition("=")
        if key in values and equals:
            values[key] = value
        elif key.lstrip("+").partition(".")[0] == "model" and equals:
            model_words.append(word)
        else:
            raise ConfigError(f"{word}: {takes} model=NAME, model.SETTING=…, {', '.join(values)}")
    return model_words, values


@contextlib.contextmanager
def hydra_errors_shown(words: Sequence[str]) -> Iterator[None]:
    """Show an error of Hydra's in the block as a line on stderr, exit code 1; HYDRA_FULL_ERROR=1: it is raised."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        if os.environ.get(FULL_ERROR):
            raise
        stop(explained(error, words))


def explained(error: Exception, words: Sequence[str]) -> str:
    """Say an error of Hydra's in a line or two, with what was probably meant. words: the command line."""
    text = str(error)
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        if group:
            known = [entry for entry in error.options if not entry.endswith("/")]
            wrong = f"there is no {group}={name}" if name else f"{group}= names no option"
            return f"{wrong}{meant(name, known)}\n{group} may be {', '.join(known)}"
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override)
    if match := re.match(r"Could not (?:override|delete from config\.) '([^']+)'", text):
        given = {**defaults(), **dict(word.lstrip("+").partition("=")[::2] for word in words)}
        return unknown(match[1], given)
    if match := re.match(r"Ambiguous value for argument '([^=]+)=(.*)'", text):
        key, values = match[1], match[2]
        first, _, rest = values.partition(",")
        if first.isdigit() and rest.isdigit():
            return f"{key}={values} is two values: write {key}={first}.{rest} for a fraction, or -m for a run of each"
        return f"{key}={values} is several values: add -m for a run of each, or write {key}=[{values}] for one list"
    if match := re.match(r"Could not append to config\. An item is already at '([^']+)'|(\S+) appears more than", text):
        key = match[1] or match[2]
        return f"{key} is there already: {key}=VALUE sets it, without + in front"
    texts = [str(reason).strip().split("\n")[0] for reason in (error, error.__cause__) if reason is not None]
    return "; ".join(dict.fromkeys(filter(None, texts)))


P = ParamSpec("P")
T = TypeVar("T")
LISTED_BY = re.compile(r"`kvexp (methods|models|tasks)`")
PYTHON_VALUES = {"null": "None", "true": "True", "false": "False"}


def in_python(dot: str | None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator of a function of `kvexp`: its ConfigErrors are in Python's words, without the frames that led to them.

    dot: between a group and its key where a setting is an argument (task__limit); None: arguments have no group.
    HYDRA_FULL_ERROR=1: the frames stay.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except ConfigError as error:
                error.args = (_python_words(str(error), dot, kwargs),)
                if os.environ.get(FULL_ERROR):
                    raise
                raise error.with_traceback(None) from None

        return called

    return decorate


def _python_words(message: str, dot: str | None, given: Iterable[str]) -> str:
    """The message with settings, values and commands of the command line as Python has them. given: arguments."""

    def argument(key: re.Match[str]) -> str:
        group, _, name = key[0].partition(".")
        return (name if dot is None else f"{group}{dot}{name}") if key[0] in known else key[0]

    known = {*settings(), *(name.replace("__", ".") for name in given), *(f"model.{name}" for name in given)}
    message = LISTED_BY.sub(r"kvexp.list_\1()", message).replace("model=local model.path=", "model=")
    message = re.sub(r"(?<![\w.])[a-z]\w*\.[a-z]\w*(?![\w.]*\()", argument, message)
    return re.sub(r"(?<==)(?:true|false|null)\b|\bnull\b", lambda value: PYTHON_VALUES[value[0]], message)


def unknown(key: str, chosen: Mapping[str, Any]) -> str:
    """Explain that there is no such setting, and which was probably meant. chosen: group -> its option, if known."""
    group, _, name = key.partition(".")
    taken, known = chosen.get(group), settings()
    if having := known.get(key):
        other = f", not of {group}={taken}: add {group}={having[0]}{' or one of the others' * (len(having) > 1)}"
        return f"{key} is a setting of {group}={','.join(having)}{other if taken else ''}"
    if not name or group not in defaults():
        near = meant(key, [*dict.fromkeys([*sorted(roots()), *known])])
        return f"there is no setting {key}{near or '; kvexp run --help lists the settings'}"
    keys = [dotted for dotted, having in known.items() if dotted.startswith(f"{group}.") and taken in (None, *having)]
    has = f"; {group}={taken} has {', '.join(dotted.partition('.')[2] for dotted in keys)}" if taken else ""
    return f"there is no setting {key}{meant(key, keys) or has}"


def meant(word: str, candidates: Collection[str]) -> str:
    """ "; did you mean h2o?", or nothing where none of the candidates is near. A dot parts a group from its keys."""
    last: dict[str, list[str]] = {}
    for candidate in candidates:
        last.setdefault(candidate.rpartition(".")[2], []).append(candidate)
    name = word.rpartition(".")[2]
    # A word that begins a name says more than letters in common do: keyformer_fig for keyformer_fig8.
    near = [name] if name in last else nearest(name, last, 3, cutoff=0.66)
    near = near or [candidate for candidate in last if name and candidate.startswith(name.lower())]
    matches = [candidate for tail in near for candidate in last[tail]]
    at_root = [candidate for candidate in matches if "." not in candidate and "." not in word]
    *first, final = (at_root or matches)[:SUGGESTIONS] or [""]
    remark = REMARKS.get(word, "")
    return f"; did you mean {', '.join(first)}{' or ' if first else ''}{final}?{remark}" if final else ""


def mistaken_option(word: str, known: Collection[str]) -> str:
    """Explain that there is no such word with dashes in front, and what was probably meant."""
    name, equals, value = word.partition("=")
    key = name.lstrip("-").replace("-", "_")
    if key.partition(".")[0] in roots():
        return f"{word}: settings have no dashes, write {key}={value if equals else 'VALUE'}"
    return f"there is no option {name}{meant(name, [*known, '--dry-run'])} (settings are KEY=VALUE; kvexp run --help)"


def _unreadable(override: str) -> str:
    """Explain a word that is no KEY=VALUE, or whose value Hydra's grammar does not take."""
    key, equals, value = override.partition("=")
    if not equals:
        known = [f"{key}=VALUE"] if key in roots() else [f"{name}={key}" for name in defaults() if key in options(name)]
        hint = f"; did you mean {' or '.join(known)}?" if known else meant(key, roots())
        return f"expected KEY=VALUE without spaces, got {override}{hint}"
    quoted = value.replace("'", "\\'")
    return f"cannot read the value in {override}: if it is a text, quote it twice, as in \"{key}='{quoted}'\""


def stop(message: str) -> NoReturn:
    """End the command with one line on stderr and exit code 1."""
    say(f"error: {message}", file=sys.stderr)
    sys.exit(1)


# -- the user's classes that a command line names ----------------------------------------------------------------------
#
# Only words that were typed come here, and become options of `method` and `task`. What a composed file names without
# that stays unknown to Hydra and to `kvexp.run.build`, so that no file can have code loaded.


def names_class(word: str) -> bool:
    """Whether a word of a command line chooses a method or a task, which may be a user's."""
    return word.lstrip("+").partition("=")[0] in BASES and "=" in word


def without_class_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line of run folders into the words that name a user's class and the others.

    What follows --where is a label to look for, and chooses nothing.
    """
    labels = next((place for place, word in enumerate(words) if word.startswith(("--where", "-w"))), len(words))
    named = [word for word in words[:labels] if names_class(word)]
    return named, [*(word for word in words[:labels] if word not in named), *words[labels:]]


def with_user_classes(words: Sequence[str]) -> list[str]:
    """Admit every user's class of a command line; returns the words with files replaced by the options they became.

    ConfigError where a class cannot be loaded, or where two have one name.
    """
    known: dict[str, AdmittedClass] = {}
    return [_translated(word, known) if names_class(word) else word for word in words]


def with_places(words: Sequence[str]) -> list[str]:
    """The command line with model=FOLDER as model=local model.path=FOLDER, and task=FILE as `task_words` has it.

    FOLDER: a folder, GGUF file or hub id. ConfigError for names and places in one word.
    """
    translated = []
    for word in words:
        key, _, value = word.partition("=")
        is_place = {"model": is_model_place, "task": is_data_file}.get(key)
        values = [] if is_place is None or value.startswith("[") else value.split(",")
        places = [choice for choice in values if is_place is not None and is_place(choice)]
        if places and len(places) < len(values):
            place = "FOLDER" if key == "model" else "FILE"
            raise ConfigError(f"{word} names {key}s and places: sweep {key}=A,B and {key}={place} in two commands")
        if places:
            translated += ["model=local", f"model.path={value}"] if key == "model" else task_words(places)
        else:
            translated.append(word)
    return translated


ROWS = {  # field of a row -> the task that reads it
    "prompt": "prompts",
    "article": "cnn_dailymail",
    "document": "xsum",
    **dict.fromkeys(("question", "questions"), "context_qa"),
}


def is_data_file(name: str) -> bool:
    """Whether a task is named by a file of its rows."""
    return name not in options("task") and Path(name).suffix in (".json", ".jsonl", ".parquet")


def task_words(files: Sequence[str], named: str = "task") -> list[str]:
    """The words for a run on files of rows, whose fields tell the task (ROWS); several files are a run each.

    ConfigError, which names the option, for rows of no known task and for files of several.
    """
    tasks = list(dict.fromkeys(task_of_rows(file, named) for file in files))
    if len(tasks) > 1:
        raise ConfigError(f"{named}={','.join(files)} are files of {' and '.join(tasks)}: give those in two commands")
    return [f"task={tasks[0]}", f"task.data_files={','.join(map(quoted, files))}"]


def task_of_rows(file: str, named: str, known: Mapping[str, str] = ROWS) -> str:
    """The task that reads such rows, by the fields of the first one. known: field -> task."""
    from kvexp.tasks.data import DataSource

    try:
        _, first = next(DataSource(data_files=file).rows(), ("", {}))
    except ConfigError as error:
        raise ConfigError(str(error).replace("task.data_files", named)) from error
    task = next((task for field, task in known.items() if field in first), None)
    if task is None:
        raise ConfigError(
            f"{named}={file}: its rows have {', '.join(first)}; kvexp knows rows with {', '.join(known)}, such as "
            f'{{"prompt": TEXT}}; or name the task, task=NAME {named.replace("task", "task.data_files")}=FILE'
        )
    return task


def quoted(text: str) -> str:
    """A text as a value in Hydra's grammar."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def check_groups(words: Sequence[str]) -> None:
    """ConfigError for a number where an option's name belongs, as in budget=0.5, which Hydra cannot compose."""
    for word in words:
        key, _, value = word.partition("=")
        if key in defaults() and re.fullmatch(r"[-+.\d]+(e-?\d+)?|true|false", value):
            way = f"{key} may be {', '.join(options(key))}"
            if key == "budget":
                share = value if value.replace(".", "", 1).isdigit() and float(value) <= 1 else "0.5"
                way = f"write kv_ratio={share} for a share of the prompt, budget=tokens budget.tokens=N for N tokens"
            raise ConfigError(f"there is no {word}: {way}")


def is_model_place(name: str) -> bool:
    """Whether a model is named by where it lies: a folder, a GGUF file, a wheel (pypi:NAME) or a hub id (ORG/NAME)."""
    return name not in options("model") and ("/" in name or ":" in name or Path(name).exists())


def named_class(group: str, name: str) -> AdmittedClass:
    """A user's class by MODULE.CLASS or FILE.py; ConfigError where there is none."""
    users = load_class(group, name)
    if users is None:
        near = meant(name, options(group))
        raise ConfigError(f"there is no {group} {name!r}{near or f'; `kvexp {group}s` lists them'}")
    return users


def make_option(users: AdmittedClass) -> str:
    """Admit the class and let Hydra know it; returns its option of `method` or `task`."""
    admit(users)
    node = {"_target_": users.target, **settings_of_class(users.cls)}
    ConfigStore.instance().store(group=users.group, name=users.option, node=node, provider="kvexp user class")
    return users.option


def _translated(word: str, known: dict[str, AdmittedClass]) -> str:
    key, _, value = word.partition("=")
    group = key.lstrip("+")
    for name in _typed_names(word):
        if name not in options(group) and not is_data_file(name):
            value = value.replace(name, _option(group, name, known))
    return f"{key}={value}"


def _option(group: str, name: str, known: dict[str, AdmittedClass]) -> str:
    """The option that a name stands for: its own where it is no user's class, which Hydra will judge."""
    users = load_class(group, name)
    if users is None:
        return name
    before = known.setdefault(users.option, users)
    if before.source != users.source:
        raise ConfigError(
            f"{before.reference} and {users.reference} are both called {users.option} in a run; rename one of the "
            "files or classes"
        )
    return make_option(users)


def _typed_names(word: str) -> Iterator[str]:
    try:
        value: Any = OverridesParser.create().parse_override(word).value()
    except HydraException:  # Hydra's turn comes, and says what is wrong with it
        return
    for entry in value.list if isinstance(value, ChoiceSweep) else [value]:
        name = entry.text if isinstance(entry, QuotedString) else entry
        if isinstance(name, str) and name:
            yield name


_store_listed()
