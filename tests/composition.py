"""Hydra composes an option of conf/ once in a process of the tests and copies what it made: else it is a tenth of them.

Kept are the configurations of kvexp's own options, before values are set in them, which Hydra does each time. Where
another folder is searched or an option is a user's, all is composed anew.
"""

import copy

from hydra._internal import config_loader_impl as loader
from hydra._internal.defaults_list import DefaultsList, Overrides, create_defaults_list

from kvexp.run.compose import LISTED, options
from kvexp.util.files import CONF

GROUPS = {name: options(name) for name in (*LISTED, *(g.name for g in CONF.iterdir() if g.is_dir()))}
COMPOSE = loader.ConfigLoaderImpl._compose_config_from_defaults_list
OWN = {"pkg://hydra.conf", f"file://{CONF}", "structured://"}
_lists, _configs = {}, {}


def _kept_list(repo, config_name, overrides_list, prepend_hydra, skip_missing):
    given = (repo, config_name, overrides_list, prepend_hydra, skip_missing)
    values = Overrides(repo=repo, overrides_list=overrides_list).config_overrides
    taken = tuple(one.input_line for one in overrides_list if not any(one is value for value in values))
    named = [line.lstrip("+~").partition("=") for line in taken]
    known = all(set(option.split(",")) <= set(GROUPS.get(group, [option])) for group, _, option in named)
    if not known or {f"{each.scheme()}://{each.path}" for each in repo.get_sources()} != OWN:
        return create_defaults_list(*given)
    key = (config_name, prepend_hydra, skip_missing, taken)
    if key not in _lists:
        _lists[key] = create_defaults_list(*given)
    kept = _lists[key]
    return DefaultsList(kept.defaults, kept.defaults_tree, values, kept.overrides)


def _kept_config(self, defaults, repo):
    key = next((key for key, kept in _lists.items() if kept.defaults is defaults), None)
    if key is None:
        return COMPOSE(self, defaults, repo)
    if key not in _configs:
        _configs[key] = COMPOSE(self, defaults, repo)
    return copy.deepcopy(_configs[key])


loader.create_defaults_list = _kept_list
loader.ConfigLoaderImpl._compose_config_from_defaults_list = _kept_config
