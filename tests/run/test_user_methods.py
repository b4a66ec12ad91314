"""Methods of a user's own: a module, a file, a class; what identifies them; who may load them."""

from __future__ import annotations

import json
import re
import shutil
import sys
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from commands import forgetting, run_py, settings
from omegaconf import OmegaConf
from small import small
from test_shared_prefill import content
from tiny import prompts_of, tiny

import kvexp.core
from kvexp import cli
from kvexp.core import (
    AttentionScoreSpec,
    Budget,
    CacheConfig,
    Cadence,
    ChangesScores,
    Method,
    Quantization,
    Simulated,
)
from kvexp.core.method import SPECIAL
from kvexp.diagnose.show import main as diagnose
from kvexp.diagnose.show import parser
from kvexp.generate import GenerationParams, decode_batches, generate, prefill_together
from kvexp.methods import H2O
from kvexp.results.views import main as results
from kvexp.retrieval.method import Retrieval
from kvexp.run.compose import without_class_words
from kvexp.run.store import runs
from kvexp.run.user_code import admitted, code_digest, in_its_file, load_class
from kvexp.run.workers import JobBatch, run_batch
from kvexp.util.errors import ConfigError
from kvexp.util.files import CONF

REGISTRY = sys.modules["kvexp.run.user_code"]
FEW = small("limit=1", "task.max_new_tokens=2", "task.nll=false")

KEYDIFF = '''"""Keys unlike the mean key stay."""

from dataclasses import dataclass

import torch

from kvexp.core import Method


@dataclass(frozen=True)
class KeyDiff(Method):
    """Keys unlike the mean key stay."""

    alpha: float = 0.3
    recent_tokens: int = 2

    def recent(self, budget):
        return self.recent_tokens

    def initial_score(self, keys, positions, seeds, layer):
        unit = torch.nn.functional.normalize(keys.float(), dim=-1)
        return -self.alpha * (unit * unit.mean(2, keepdim=True)).sum(-1)
'''


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """Methods, modules and folders that a test has loaded, paths that it has added."""
    with forgetting(monkeypatch, "keydiff", "helper", "pack", "pack.keydiff", "pack.helper", "other", "evil"):
        yield


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with keydiff.py in it."""
    (tmp_path / "keydiff.py").write_text(KEYDIFF)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def command(monkeypatch, capsys):
    return lambda *words: run_py(monkeypatch, capsys, *words, *FEW)


def of_method(folder):
    """The runs of a method, without their baselines, by hash."""
    return {run.hash: run for run in runs(folder / "outputs") if run.labels["method"] != "full"}


# -- a module, a file ---------------------------------------------------------------------------------------------


def test_a_module_in_the_current_folder_is_a_method_with_its_fields(command, folder):
    code, out, err = command("method=keydiff.KeyDiff", "method.alpha=0.4")
    assert code == 0 and "keydiff.KeyDiff" in out, err
    (run,) = of_method(folder).values()
    digest = run.config["method"].pop("source")["files"]["keydiff.py"]
    assert len(digest) == 64
    assert run.config["method"] == {"name": "KeyDiff", "alpha": 0.4, "recent_tokens": 2}
    assert run.labels["method"] == "keydiff.KeyDiff" and run.labels["setting"].startswith("method.alpha=0.4")
    assert all(row["receipt"]["first_eviction_step"] == 0 for row in run.rows())
    assert not (folder / "__pycache__").exists()


def test_a_file_is_the_module_of_its_name(command, folder):
    assert command("method=keydiff.KeyDiff")[0] == 0
    (first,) = of_method(folder)
    for words in ("method=keydiff.py", "method=./keydiff.py:KeyDiff"):
        code, out, err = command(words)
        assert code == 0 and "1 of 1 rows are there already" in out, err
    assert list(of_method(folder)) == [first]
    (folder / "a folder").mkdir()
    shutil.move("keydiff.py", "a folder/keydiff.py")
    code, out, err = command("method='a folder/keydiff.py'")
    assert code == 0 and "1 of 1 rows are there already" in out, err


def test_an_edited_file_has_new_rows_and_the_old_ones_come_back(command, folder):
    """Twice of the same length and within a second: Python alone would take up the compiled form of before."""
    seen = []
    for sign in ("-", "+", "-"):
        (folder / "keydiff.py").write_text(KEYDIFF.replace("return -self.alpha", f"return {sign}self.alpha"))
        code, out, err = command("method=keydiff.KeyDiff")
        assert code == 0, err
        seen.append((len(of_method(folder)), "1 of 1 rows are there already (outputs/" in out.split("full")[-1]))
    assert [count for count, _ in seen] == [1, 2, 2]
    kept = {tuple(row["receipt"]["kept_digest"] for row in run.rows()) for run in of_method(folder).values()}
    assert len(kept) == 2, "the edited code was not what ran"


def test_a_comment_layout_or_docstring_makes_no_new_run_and_older_code_is_left_out(command, folder, capsys):
    file = folder / "keydiff.py"
    assert command("method=keydiff.KeyDiff")[0] == 0
    (first,) = of_method(folder)
    commented = KEYDIFF.replace("import torch\n", "import torch  # tensors\n\n\n").replace("unlike", "far from")
    for text in (commented, KEYDIFF.replace("return -self.alpha * (", "return -self.alpha * (  # away\n            ")):
        file.write_text(text)
        code, out, err = command("method=keydiff.KeyDiff")
        assert code == 0 and "1 of 1 rows are there already" in out, err
    assert list(of_method(folder)) == [first], "the identity is the one of before"
    file.write_text(KEYDIFF.replace("return -self", "return self"))
    assert command("method=keydiff.KeyDiff")[0] == 0
    (second,) = set(of_method(folder)) - {first}

    def shown(*words):
        capsys.readouterr()
        assert results(["outputs", "--csv", "all.csv", *words]) == 0
        return pd.read_csv("all.csv"), capsys.readouterr().out

    table, out = shown()
    assert set(table["hash"]) == {second, *table.loc[table["method"] == "full", "hash"]}
    assert "left out: 1 run of older code of keydiff.KeyDiff; --all-versions" in out and "code" in out
    assert set(table["comparisons"]) == {1}
    both, out = shown("--all-versions")
    assert {first, second} < set(both["hash"]) and both["code"].nunique() == 2 and "left out" not in out
    assert set(both["comparisons"]) == {2} and both["setting"].dropna().str.contains("code=").sum() == 2
    file.write_text(commented)  # the code of the first run again, which is not the one that ran last
    assert set(shown()[0]["hash"]) - {second} == set(shown()[0]["hash"]) and first in set(shown()[0]["hash"])
    file.unlink()
    assert second in set(shown()[0]["hash"]) and first not in set(shown()[0]["hash"]), "the newest, without a file"


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("x = 1  # one\n\n", True),
        ("x = (1)\n", True),
        ('"""Doc."""\nx = 1\n', True),
        ("x = 2\n", False),
        ('"""Doc."""\nx = 1\ny = __doc__\n', False),
        ("x = 1 +\n", False),
    ],
)
def test_the_digest_of_code(text, same):
    assert (code_digest(text) == code_digest("x = 1\n")) is same
    assert code_digest(text.encode()) == code_digest(text)


@pytest.mark.parametrize("how", ["package", *(pytest.param(how, marks=pytest.mark.slow) for how in ("module", "late"))])
def test_what_the_file_imports_counts_too(command, folder, how):
    place, name = (folder / "pack", "pack.keydiff") if how == "package" else (folder, "keydiff")
    place.mkdir(exist_ok=True)
    if how == "package":
        (place / "__init__.py").write_text("")
    text = KEYDIFF.replace("return -self", "return SIGN * -self")
    if how == "late":
        text = text.replace("        unit =", "        from helper import SIGN\n\n        unit =")
    else:
        text = f"from {'.' * (how == 'package')}helper import SIGN\n{text}"
    (place / "keydiff.py").write_text(text)
    (place / "helper.py").write_text("SIGN = 1\n")
    (folder / "bystander.py").write_text("x = 1\n")
    assert command(f"method={name}.KeyDiff")[0] == 0
    (place / "helper.py").write_text("SIGN = -1\n")
    code, _, err = command(f"method={name}.KeyDiff")
    assert code == 0, err
    (run, _) = of_method(folder).values()
    files = (
        ["pack/__init__.py", "pack/helper.py", "pack/keydiff.py"] if how == "package" else ["helper.py", "keydiff.py"]
    )
    assert sorted(run.config["method"]["source"]["files"]) == files


def test_in_a_sweep_it_shares_prefills_and_makes_the_rows_it_makes_alone(command, folder):
    words = ("-m", "method=h2o,keydiff.KeyDiff", "kv_ratio=0.3")
    code, out, err = command(*words)
    assert code == 0 and "keydiff.KeyDiff" in out and "[2/2]" not in out, err
    assert command(*words, "hydra/launcher=basic", "outputs_dir=alone")[0] == 0
    ours, alone = content(folder / "outputs"), content(folder / "alone")
    assert len(ours) == 3 and ours.keys() == alone.keys()
    for name, (*_, rows) in ours.items():
        for example, row in rows.items():
            assert row["output"] == alone[name][-1][example]["output"]
            assert row["receipt"]["kept_digest"] == alone[name][-1][example]["receipt"]["kept_digest"]


def test_dry_run_and_two_files_in_a_sweep(command, folder):
    (folder / "other.py").write_text(KEYDIFF)
    code, out, err = command("--dry-run", "-m", "method=keydiff.py,other.py:KeyDiff", "kv_ratio=0.5")
    assert code == 0 and "3 runs" in out and "other.KeyDiff" in out, err
    assert not (folder / "outputs").exists()


def test_a_worker_loads_the_same_code_or_none(folder):
    method = load_class("method", "keydiff.KeyDiff")
    assert not admitted()
    assert run_batch(JobBatch([], [], [("method", method.reference, method.source)])).failures == []
    assert list(admitted()) == ["keydiff.KeyDiff"]
    (folder / "keydiff.py").write_text(KEYDIFF.replace("0.3", "0.5"))
    REGISTRY._ADMITTED.clear()
    with pytest.raises(ConfigError, match=r"code of keydiff\.KeyDiff is not, in this worker, what it was"):
        run_batch(JobBatch([], [], [("method", method.reference, method.source)]))


# -- what is wrong with it ----------------------------------------------------------------------------------------

TWO = KEYDIFF + "\n\nclass Second(KeyDiff):\n    pass\n"
CLASS = "method=keydiff.KeyDiff"
WRONG = {  # words; what the one line says; keydiff.py, where it is another
    "no module": ("method=keydif.KeyDiff", r"no module keydif in .*; did you mean keydiff\.py\?"),
    "no file": ("method=keydif.py", r"method=keydif\.py: .*; did you mean keydiff\.py\?"),
    "no class": ("method=keydiff.KeyDif", r"no class KeyDif in keydiff .*; did you mean KeyDiff\?"),
    "no method": ("method=keydiff.Other", "is no class that extends", KEYDIFF + "class Other: pass\n"),
    "a function": ("method=keydiff.f", "is no class that extends", KEYDIFF + "def f(): pass\n"),
    "two in a file": ("method=keydiff.py", r"has 2 methods \(KeyDiff, Second\); say which one", TWO),
    "none in a file": ("method=keydiff.py", r"keydiff\.py has no class that extends", "x = 1\n"),
    "import": (CLASS, r"keydiff\.py line 3: NameErr", "import torch\n\nx = torhc.zeros(1)\n"),
    "import of": (CLASS, r"keydiff\.py line 1: ModuleNotFoundError", "import nosuchthing\n"),
    "syntax": (CLASS, r"keydiff\.py line 1: SyntaxError", "def f(:\n"),
    "exits": (CLASS, r"keydiff\.py line 2: SystemExit: 3", "import sys\nsys.exit(3)\n"),
    "frozen": (CLASS, r"line \d+: TypeError: cannot inherit non", KEYDIFF.replace("(frozen=True)", "")),
    "no dataclass": (CLASS, "field alpha and is no dataclass", KEYDIFF.replace("@dataclass(frozen=True)\n", "")),
    "a tensor": (CLASS, r"KeyDiff\.alpha is a builtin", KEYDIFF.replace("float = 0.3", "object = torch.ones")),
    "kvexp's own": ("method=keydiff.H2O", "is kvexp's own H2O", "from kvexp.methods import H2O\n"),
    "kvexp itself": ("method=kvexp.methods.H2O", "is called as a module that is there already"),
    "python's name": ("method=random.py", r"random\.py is called as a module that is there already"),
    "no class named": ("method=.KeyDiff", r"method=\.KeyDiff must be MODULE\.CLASS or a file"),
    "no python": ("method=folder/keydiff.yaml", r"keydiff\.yaml must be MODULE\.CLASS or a file"),
    "typed": (f"{CLASS} method.alpha=much", "method.alpha must be a number, got 'much'"),
    "field": (f"{CLASS} method.alhpa=1", "no setting method.alhpa; did you mean method.alpha?"),
    "another's field": (f"{CLASS} method.recent_ratio=1", "setting of method=.*h2o.*, not of method=keydiff.KeyDiff"),
    "added field": (f"{CLASS} +method.beta=1", "method.beta is not a setting of KeyDiff"),
    "open field": (CLASS, "method.alpha has no value; set it", KEYDIFF.replace("= 0.3", "")),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line_before_anything_runs(command, folder, case):
    words, said, *text = WRONG[case]
    (folder / "keydiff.py").write_text(text[0] if text else KEYDIFF)
    (folder / "random.py").write_text(KEYDIFF)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvexp.run.model_spec.load", lambda *_: pytest.fail("a model was loaded"))
        code, out, err = command(*words.split())
    lines = [line for line in err.splitlines() if line]
    assert code == 1 and "Traceback" not in err, out + err
    assert re.search(said, lines[0]), err
    assert len(lines) == 1, err


def test_two_classes_of_one_name(command, folder):
    (folder / "other").mkdir()
    (folder / "other" / "keydiff.py").write_text(KEYDIFF + "other = 1\n")
    code, _, err = command("-m", "method=keydiff.py,other/keydiff.py")
    assert code == 1 and "are both called keydiff.KeyDiff" in err


HOOKS = {  # a hook, its arguments, what it returns; what is said of that
    "initial_score": ("keys, positions, seeds, layer", "torch.zeros(keys.shape[0], 1, keys.shape[2])", "[1, 3, 30]"),
    "priority": ("ctx", "ctx.score.sum(1)", "[1, 3, 30]"),
    "priority of": ("ctx", "ctx.score.tolist()", "a list"),
    "after_eviction": ("score", "score.sum(1)", "[1, 3, 8]"),
    "query_mask": ("probabilities, ctx", "probabilities[0] > 0.1", "[1, 3, 31]"),
    "query_mask of": ("probabilities, ctx", "probabilities", "dtype torch.bool, got torch.float32"),
    "hidden_next_step": ("ctx", "ctx.age()[:, :1] == 3", "[1, 3, 30]"),
    "hidden_next_step of": ("ctx", "ctx.score", "dtype torch.bool, got torch.float32"),
}
FLAGS = {"query_mask": "per_query = True", "hidden_next_step": "simulation_only = True"}


def base_of(hook):
    """The class that a method with this hook derives from."""
    return getattr(kvexp.core, SPECIAL.get(hook, "Method"))


@pytest.mark.parametrize(("hook", "special"), SPECIAL.items())
def test_a_hook_that_no_plain_method_is_asked_for_is_refused(hook, special):
    with pytest.raises(ConfigError, match=rf"Odd.{hook} is only asked of kvexp.core.{special}: derive the class"):
        exec(f"class Odd(Method):\n    {hook} = None\n", {"Method": Method})


@pytest.mark.parametrize("case", HOOKS)
def test_a_hook_of_another_shape_is_named(case):
    arguments, made, said = HOOKS[case]
    hook = case.split()[0]
    scope, flag = {"torch": torch, "Base": base_of(hook)}, FLAGS.get(hook, "pass")
    exec(f"class Odd(Base):\n    {flag}\n    def {hook}(self, {arguments}):\n        return {made}\n", scope)
    mode = "mask" if hook in FLAGS else "overwrite"
    with pytest.raises(ConfigError, match=rf"Odd.{hook} must return .*{re.escape(said)}"):
        generate(tiny("llama"), prompts_of(4, (30,)), scope["Odd"](), Budget(tokens=7), mode=mode)


def test_hiding_slots_where_nothing_is_hidden_is_refused():
    class Hides(Simulated):
        def hidden_next_step(self, ctx):
            return ctx.age() == 3

    with pytest.raises(ConfigError, match=r"Hides.hidden_next_step hides slots .* cache.mode=overwrite cannot: set"):
        generate(tiny("llama"), prompts_of(4, (30,)), Hides(), Budget(tokens=7))


def test_a_slot_of_the_lowest_priority_goes_first_in_the_fast_step_too():
    class Lowest(Method):
        @property
        def sinks(self):
            return 2

        def priority(self, ctx):
            return torch.where(ctx.positions % 3 == 0, -torch.inf, ctx.positions.float())

    def kept(mode):
        decoding = GenerationParams(max_new_tokens=8, eos=None)
        done = generate(tiny("llama"), prompts_of(4, (30,)), Lowest(), Budget(tokens=9), decoding=decoding, mode=mode)
        return [done.cache.kept_positions(layer) for layer in range(2)]

    assert kept("overwrite") == kept("compact")


PROMPT = 30


class NoNumber(Method):
    """NaN for the newest slot once so many tokens were seen; for dead slots always."""

    since: ClassVar[int] = 0

    def priority(self, ctx):
        made = ctx.positions.float() * (0.0 / (ctx.positions >= 0))
        return made.masked_fill((ctx.age() == 0) & (ctx.newest[:, None, None] >= self.since), torch.nan)


class NoNumberLater(NoNumber):
    since: ClassVar[int] = PROMPT + 3


class NoScore(Method):
    def initial_score(self, keys, positions, seeds, layer):
        return torch.where(positions == 3, torch.nan, positions.float())[:, None].expand(keys.shape[:3])


class NoScoreLater(ChangesScores):
    def after_eviction(self, score):
        return score * torch.nan


FORMS = {  # forms of the decode step: the fast one alone and in a stack, and what takes the ordinary one
    "overwrite": {"mode": "overwrite"},
    "compact": {"mode": "compact"},
    "mask": {"mode": "mask"},
    "every": {"cadence": Cadence(every=2)},
    "quantised": {"quantization": Quantization(residual=4, group=7)},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cls", [NoNumber, NoNumberLater, NoScore, NoScoreLater])
def test_priorities_that_are_no_number_are_refused(cls, form):
    """An error, also where they become NaN while an answer grows; what a dead slot has counts nowhere."""
    decoding = GenerationParams(max_new_tokens=10, eos=None)
    with pytest.raises(ConfigError, match=rf"{cls.__name__}.priority is NaN for slots that hold a token"):
        generate(tiny("llama"), prompts_of(4, (PROMPT, 12)), cls(), Budget(tokens=9), decoding=decoding, **FORMS[form])


def test_priorities_that_are_no_number_are_refused_beside_other_methods():
    """In steps of several caches, which decode together."""
    configs = [CacheConfig(method(), Budget(tokens=9)) for method in (H2O, NoNumberLater)]
    contexts = prefill_together(tiny("llama"), prompts_of(4, (PROMPT,)), configs, max_new_tokens=10)
    with pytest.raises(ConfigError, match=r"NoNumberLater.priority is NaN"):
        decode_batches(tiny("llama"), [contexts], GenerationParams(max_new_tokens=10, eos=None), [[0]], None, start=0.0)


def test_numbers_for_held_slots_pass():
    class Numbers(NoNumber):
        since: ClassVar[int] = 10**6

    decoding = GenerationParams(max_new_tokens=10, eos=None)
    generate(tiny("llama"), prompts_of(4, (PROMPT, 12)), Numbers(), Budget(tokens=9), decoding=decoding)


def test_a_relevance_that_is_no_number_is_refused():
    class NoRelevance(Retrieval):
        def relevance(self, retrieval_query):
            return retrieval_query.exact_logits().sum(2) * torch.nan

    with pytest.raises(ConfigError, match=r"NoRelevance.relevance is NaN"):
        generate(tiny("llama"), prompts_of(4, (PROMPT,)), NoRelevance(n_sinks=1), Budget(tokens=9))


CHANGES = {  # a hook, its arguments, what it changes, what it returns; what is named
    "keys": ("priority", "ctx", "ctx.slots.keys[..., 0] = 0", "ctx.score", "ctx.slots.keys"),
    "values": ("priority", "ctx", "ctx.slots.values.mul_(2)", "ctx.score", "ctx.slots.values"),
    "score": ("priority", "ctx", "ctx.score.add_(1)", "ctx.score", "ctx.slots.score"),
    "positions": ("priority", "ctx", "ctx.slots.positions[:, :, :2].fill_(5)", "ctx.score", "ctx.slots.positions"),
    "budget": ("priority", "ctx", "ctx.budget.add_(1)", "ctx.score", "ctx.budget"),
    "later": ("priority", "ctx", "ctx.newest[0] > 32 and ctx.slots.keys.zero_()", "ctx.score", "ctx.slots.keys"),
    "data": ("priority", "ctx", "ctx.slots.keys.data.mul_(2)", "ctx.score", "ctx.slots.keys"),
    "NumPy": ("priority", "ctx", "ctx.slots.values.numpy()[..., 0] = 0", "ctx.score", "ctx.slots.values"),
    "another": ("priority", "ctx", "ctx.slots.keys = ctx.slots.keys * 2", "ctx.score", "ctx.slots.keys"),
    "new data": ("initial_score", "keys, positions, seeds, layer", "keys.data.div_(2)", "None", "keys"),
    "seen data": (
        *("query_mask", "probabilities, ctx", "ctx.slots.keys.data.mul_(2)", "probabilities > 0.1", "ctx.slots.keys"),
    ),
    "new keys": ("initial_score", "keys, positions, seeds, layer", "keys.div_(2)", "None", "keys"),
    "old score": ("after_eviction", "score", "score.mul_(2)", "score", "score"),
    "seen": ("query_mask", "probabilities, ctx", "ctx.slots.keys.mul_(2)", "probabilities > 0.1", "ctx.slots.keys"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_in_place_is_refused(case):
    hook, arguments, change, made, named = CHANGES[case]
    scope = {"torch": torch, "Base": base_of(hook)}
    flag = "per_query = True" if hook == "query_mask" else "pass"
    body = f"        {change}\n        return {made}\n"
    exec(f"class Odd(Base):\n    {flag}\n    def {hook}(self, {arguments}):\n{body}", scope)
    mode = "mask" if hook == "query_mask" else "overwrite"
    decoding = GenerationParams(max_new_tokens=8, eos=None)
    with pytest.raises(ConfigError, match=rf"Odd.{hook} changes {named} in place, .* as in {named}.clone"):
        generate(
            tiny("llama"), prompts_of(4, (PROMPT,)), scope["Odd"](), Budget(tokens=7), decoding=decoding, mode=mode
        )


def test_a_context_counts_steps_and_layers_in_the_fast_step_too():
    class Counts(Method):
        def priority(self, ctx):
            assert ctx.layers == 2
            return ctx.positions.float() * (-1) ** ctx.steps

    def kept(mode):
        decoding = GenerationParams(max_new_tokens=8, eos=None)
        done = generate(tiny("llama"), prompts_of(4, (30,)), Counts(), Budget(tokens=9), decoding=decoding, mode=mode)
        return [done.cache.kept_positions(layer) for layer in range(2)]

    assert kept("overwrite") == kept("compact")


def test_complex_priorities_are_refused():
    class Odd(Method):
        def priority(self, ctx):
            return ctx.score * 1j

    with pytest.raises(ConfigError, match=r"Odd.priority must return real numbers, got torch.complex64"):
        generate(tiny("llama"), prompts_of(4, (PROMPT,)), Odd(), Budget(tokens=7))


@pytest.mark.parametrize("form", FORMS)
def test_keys_changed_in_place_are_refused_in_every_form_of_a_cache(form):
    class Odd(Method):
        def priority(self, ctx):
            ctx.slots.keys[:, :, 0] *= 2
            return ctx.score

    with pytest.raises(ConfigError, match=r"Odd.priority changes ctx.slots.keys in place"):
        generate(tiny("llama"), prompts_of(4, (PROMPT,)), Odd(), Budget(tokens=7), **FORMS[form])


def test_a_hook_of_a_base_of_ones_own_is_watched_too():
    class Base:
        def priority(self, ctx):
            ctx.slots.keys.mul_(2)
            return ctx.score

    class Odd(Base, Method):
        pass

    with pytest.raises(ConfigError, match=r"Odd.priority changes ctx.slots.keys in place"):
        generate(tiny("llama"), prompts_of(4, (PROMPT,)), Odd(), Budget(tokens=7))


DECLARED = {
    "score_spec": ("def score_spec(self): return None", "score_spec must be a property .* AttentionScoreSpec or None"),
    "sinks": ("def sinks(self): return 2", "sinks must be a property .* a whole number, got <bound"),
    "field": ("recent = 3", "recent must be a method recent.self, budget. .*, got 3"),
    "recent": ("def recent(self, budget): return 0.5 * budget", "recent must return a whole number of tokens, got 3.5"),
}


@pytest.mark.parametrize("case", DECLARED)
def test_a_declaration_of_another_kind_is_named(case):
    line, said = DECLARED[case]
    scope = {"Method": Method}
    exec(f"class Odd(Method):\n    {line}\n", scope)
    with pytest.raises(ConfigError, match=f"Odd.{said}"):
        generate(tiny("llama"), prompts_of(4, (30,)), scope["Odd"](), Budget(tokens=7))


# -- lm-eval ------------------------------------------------------------------------------------------------------

LM_EVAL = {  # as typed after --model_args: as lm-eval gets it
    "pretrained=.,method=keydiff.py,kv_ratio=0.5": "pretrained=.,method=keydiff.KeyDiff,kv_ratio=0.5",
    "method=keydiff.py:KeyDiff,pretrained=.,kv_ratio=0.5": "method=keydiff.KeyDiff,pretrained=.,kv_ratio=0.5",
    "pretrained=.,method=keydiff.KeyDiff,kv_ratio=0.5": "pretrained=.,method=keydiff.KeyDiff,kv_ratio=0.5",
    '{"pretrained": ".", "method": "keydiff.py", "kv_ratio": 0.5}': (
        '{"pretrained": ".", "method": "keydiff.KeyDiff", "kv_ratio": 0.5}'
    ),
    "pretrained=.,method=h2o,kv_ratio=0.5": "pretrained=.,method=h2o,kv_ratio=0.5",
}


@pytest.mark.parametrize("typed", LM_EVAL)
def test_lm_eval_takes_a_method_that_is_typed(typed, folder, monkeypatch):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed; it comes with kvexp[eval]")
    from kvexp.run.lm_eval_model import ModelArguments, _check_model, _merged

    monkeypatch.setattr("kvexp.run.lm_eval_model.check_source", lambda *_: None)
    rest = ["--model_args", typed, "--output_path", "keydiff.py"]
    given = _merged([typed])
    assert _check_model(given, [typed], rest) == ["--model_args", LM_EVAL[typed], "--output_path", "keydiff.py"]
    if "keydiff" in typed:
        cache = ModelArguments.of("keydiff.KeyDiff", 0.5, "prefill_then_step", {"method.alpha": 0.4}).cache
        assert (type(cache.method).__name__, cache.method.alpha, cache.budget.kv_ratio) == ("KeyDiff", 0.4, 0.5)


def test_lm_eval_in_python_takes_a_method_object_and_loads_no_method_that_nobody_typed(folder):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed; it comes with kvexp[eval]")
    from kvexp.run.lm_eval_model import ModelArguments

    class Newest(Method):
        def priority(self, ctx):
            return ctx.positions.float()

    assert ModelArguments.of(Newest(), 0.5, "prefill_then_step", {}).cache.method == Newest()
    with pytest.raises(ConfigError, match="method is a Newest already: give it its settings"):
        ModelArguments.of(Newest(), 0.5, "prefill_then_step", {"method.alpha": 1})
    with pytest.raises(ConfigError, match=r"named in --model_args .*, got 'keydiff.KeyDiff'"):
        ModelArguments.of("keydiff.KeyDiff", 0.5, "prefill_then_step", {})
    assert "keydiff" not in sys.modules


# -- nobody else names it -----------------------------------------------------------------------------------------

EVIL = "import os\nos.makedirs(r'{marker}', exist_ok=True)\n" + KEYDIFF


@pytest.fixture
def planted(folder, monkeypatch):
    """(marker, folder of configurations): evil.py lies where it can be imported, and leaves the marker if it is."""
    marker = folder / "was_run"
    (folder / "evil.py").write_text(EVIL.format(marker=marker))
    monkeypatch.syspath_prepend(str(folder))
    (folder / "conf" / "experiment").mkdir(parents=True)
    (folder / "conf" / "method").mkdir()
    (folder / "conf" / "method" / "mine.yaml").write_text("_target_: evil.KeyDiff\nalpha: 0.1\n")
    return marker, folder / "conf"


FILES = {  # what stands in an experiment's file: words of the refusal
    "method: {_target_: evil.KeyDiff, alpha: 0.3, recent_ratio: null}": "method._target_ must name a class of kvexp",
    "defaults: [{override /method: evil.KeyDiff}]": "there is no method=evil.KeyDiff",
    "defaults: [{override /method: mine}]": "method._target_ must name a class of kvexp",
    "method_file: evil.py": "there is no setting method_file",
    "hydra: {mode: MULTIRUN, sweeper: {params: {method: 'h2o,evil.KeyDiff'}}}": "there is no method=evil.KeyDiff",
    "hydra: {mode: MULTIRUN, sweeper: {params: {+method_file: evil.py}}}": "there is no setting method_file",
    "hydra: {mode: MULTIRUN, sweeper: {params: {method._target_: evil.KeyDiff}}}": "method._target_ must name a class",
    "method: {_target_: '${evil}'}\nevil: evil.KeyDiff": "there is no setting evil",
}


@pytest.mark.parametrize("text", FILES)
def test_no_file_loads_a_users_code(command, planted, folder, text):
    marker, conf = planted
    (conf / "experiment" / "evil.yaml").write_text(f"# @package _global_\n{text}\n")
    code, out, err = command("--config-dir", str(conf), "experiment=evil")
    assert code == 1 and FILES[text] in err and "Traceback" not in err, out + err
    assert not marker.exists(), "planted code was run"
    assert not list(runs(folder / "outputs")) if (folder / "outputs").exists() else True


@pytest.mark.parametrize(
    "words",
    [
        "method=mine",
        "method._target_=evil.KeyDiff",
        "-m method=glob(m*)",
        "method=keydiff.KeyDiff experiment=evil",  # another method that is typed opens no door
    ],
)
def test_an_option_of_a_file_is_not_typed_code(command, planted, words):
    marker, conf = planted
    (conf / "experiment" / "evil.yaml").write_text("# @package _global_\nmethod: {_target_: evil.KeyDiff}\n")
    code, _, err = command("--config-dir", str(conf), *words.split())
    assert code == 1 and "say so on the command line: method=evil.KeyDiff" in err, err
    assert not marker.exists()


def test_a_run_folder_loads_no_code(command, planted, folder, capsys):
    marker, _ = planted
    assert command("method=keydiff.KeyDiff")[0] == 0
    REGISTRY._ADMITTED.clear()
    ((name, run),) = of_method(folder).items()
    words = ["show", f"outputs/{name}", "0"]
    assert diagnose(words) == 2
    assert "say so on the command line: method=keydiff.KeyDiff" in capsys.readouterr().err
    assert diagnose([*words, "method=keydiff.KeyDiff"]) == 0, capsys.readouterr().err
    asked = json.loads((run.path / "command.json").read_text())
    assert asked["method_found_as"] == "keydiff.KeyDiff"
    asked["config"]["method"]["_target_"] = "evil.KeyDiff"
    asked["method_found_as"] = "evil.KeyDiff"
    (run.path / "command.json").write_text(json.dumps(asked))
    shutil.rmtree(run.path / "diagnose")
    assert diagnose([*words, "method=keydiff.KeyDiff"]) == 2 and not marker.exists()


def test_what_follows_where_names_no_method():
    words = ["gap", "outputs", "method=keydiff.KeyDiff", "--where", "method=h2o", "kv_ratio=0.5"]
    named, others = without_class_words(words)
    assert named == ["method=keydiff.KeyDiff"]
    assert parser().parse_args(others).where == ["method=h2o", "kv_ratio=0.5"]
    assert without_class_words(["outputs", "-w", "method=h2o"]) == ([], ["outputs", "-w", "method=h2o"])


# -- kvexp methods NAME -------------------------------------------------------------------------------------------


def listed(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["kvexp", "methods", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return (stopped.value.code, *capsys.readouterr())


def test_the_list_says_what_a_class_of_a_file_is(folder, monkeypatch, capsys):
    code, out, _ = listed(monkeypatch, capsys, "keydiff.KeyDiff", "keydiff.py")
    assert code == 0 and out.count("# Keys unlike the mean key stay.\nalpha: 0.3\nrecent_tokens: 2\n") == 2
    assert listed(monkeypatch, capsys, "keydiff.Nothing")[0] == 2


# -- kvexp's own methods ------------------------------------------------------------------------------------------


def test_the_identity_of_kvexps_own_methods_has_no_source():
    own = {"name": "h2o", "recent_ratio": 0.5, "impl": "real_drop", "score_batch": "per_beam"}
    assert settings("method=h2o", *FEW).identity["method"] == own


# -- kvexp.compare ------------------------------------------------------------------------------------------------


def test_objects_of_a_class_beside_h2o_in_one_call(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    import keydiff

    few = {"model": "tiny", "task": "sample", "limit": 1, "task__max_new_tokens": 2, "task__nll": False}
    made = kvexp.compare([keydiff.KeyDiff(), keydiff.KeyDiff(alpha=0.5), "h2o"], kv_ratio=[0.3, 0.5], **few)
    table = made
    assert isinstance(table, pd.DataFrame)
    assert sorted(table["method"]) == ["full"] + ["h2o"] * 2 + ["keydiff.KeyDiff"] * 4
    assert set(table["kv_ratio"].dropna()) == {0.3, 0.5} and (table["status"] == "done").all()
    assert table["setting"].str.contains("method.alpha=0.5").sum() == 2
    assert "<table" in made._repr_html_() and "KeyDiff" in made._repr_html_()
    before = set((folder / "outputs").glob("*/examples.jsonl"))
    again = kvexp.compare(["keydiff.py"], kv_ratio=0.3, **few)
    assert set(again["hash"]) <= set(table["hash"])
    (folder / "keydiff.py").write_text(KEYDIFF.replace("return -self", "return self"))
    kvexp.compare([keydiff.KeyDiff], kv_ratio=0.3, **few)
    assert len(set((folder / "outputs").glob("*/examples.jsonl")) - before) == 1


def test_a_comparison_of_few_prompts_shows_and_draws_kl(folder, capsys):
    """Prompts without answers have no percentage; the frame has what differs, the figure says n."""
    few = {"model": "testbed_rope", "task__max_new_tokens": 3}
    prompts = ["text : food milo rice . ask food milo", "text : city nora ford . ask city nora"]
    runs = kvexp.compare(["window", "h2o"], kv_ratio=0.5, prompts=prompts, **few)
    assert list(runs["n"]) == [2, 2, 2] and (runs["task"] == "prompts").all()
    compared = runs[runs["method"] != "full"]
    assert (compared["kl"] >= 0).all() and {"kl_low", "kl_high", "top1"} <= set(runs)
    constant = {name for name in runs if runs[name].astype(str).nunique() == 1}
    assert constant <= {"model", "task", "setting", "n", "kl_low", "kl_high", "verdict_kl", "status", "note"}
    assert len(runs.whole.columns) > 2 * len(runs.columns)
    printed = repr(runs)
    assert "testbed_rope / prompts" in printed and "kl" in printed and "0.5" in printed and "window" in printed
    (axes,) = runs.figure().axes
    assert axes.get_ylabel().startswith("KL from the full cache") and "n = 2" in axes.get_title()
    assert runs._repr_html_().startswith("<img")
    with pytest.raises(ConfigError, match="no finished runs with a baseline and a score"):
        runs.figure("rouge1")
    short = kvexp.compare(
        ["window"], kv_ratio=0.5, prompts=np.array(prompts), model="testbed_rope", task__max_new_tokens=1
    )
    assert "no KL, which takes answers of two tokens or more" in repr(short)
    with pytest.raises(ConfigError, match=r"nor KL, which has to be measured and takes answers of two") as error:
        short.figure()
    assert "--" not in str(error.value)
    (folder / "empty").mkdir()
    assert results(["empty", "--plot", "none.png"]) == 2 and "there are no runs to draw" in capsys.readouterr().err
    assert results(["outputs", "--plot", "kl.png"]) == 0 and (folder / "kl.png").stat().st_size > 10_000
    (file,) = (folder / "outputs" / ".prompts").iterdir()
    data = folder / "my.jsonl"
    data.write_bytes(file.read_bytes())
    for again in (
        kvexp.compare(["window"], kv_ratio=0.5, data="my.jsonl", **few),
        kvexp.compare(["window"], "my.jsonl", kv_ratio=0.5, **few),
        kvexp.compare(["window"], "prompts", data="my.jsonl", kv_ratio=0.5, **few),
    ):
        assert set(again["hash"]) <= set(runs["hash"])


@pytest.mark.slow
def test_a_curve_is_drawn_where_there_are_examples_enough(folder):
    few = {"model": "testbed_rope", "task": "testbed_summary", "task__max_new_tokens": 3, "limit": 20}
    made = kvexp.compare(["window", "keydiff.py"], kv_ratio=0.5, **few)
    assert set(made["method"]) == {"full", "window", "keydiff.KeyDiff"}
    _, labels = made.figure().axes[0].get_legend_handles_labels()
    assert {"window", "keydiff.KeyDiff"} <= set(labels)
    assert made._repr_html_().startswith("<img") and "<table" in made._repr_html_()


def test_what_is_not_given_is_as_the_command_line_has_it(folder, monkeypatch):
    seen = []

    def taken(jobs, session):
        seen.extend(jobs)
        raise ConfigError("enough")

    monkeypatch.setattr("kvexp.results.curves.run_jobs", taken)
    with pytest.raises(ConfigError, match="enough"):
        kvexp.compare(["h2o"], kv_ratio=0.5)
    plain = OmegaConf.to_container(OmegaConf.load(CONF / "config.yaml"))
    defaults = {key: value for one in plain["defaults"] if isinstance(one, dict) for key, value in one.items()}
    for group in ("model", "task", "generation", "budget", "prefill"):
        assert seen[0].choices[group] == defaults[group]
    assert all(seen[0].config[key] == plain[key] for key in ("limit", "seed", "questions", "keep"))


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        ("h2o", "methods must be a list .* got 'h2o'"),
        ([3], "methods holds a int"),
        (["h20"], "there is no method 'h20'; did you mean h2o"),
    ],
)
def test_what_compare_takes_for_no_method(methods, said):
    with pytest.raises(ConfigError, match=said):
        kvexp.compare(methods)


def test_a_wrong_guess_of_compare_gets_a_sentence():
    for given, said in {
        "prompts='A text.'": "prompts must be a list of texts",
        "prompts=[3]": "prompts holds 3; a prompt is a text",
        "prompts=['a'], task='news'": "leave out task and data",
        "data='none.jsonl'": "data=none.jsonl: there is no such file",
        "ratio=0.5": "did you mean kv_ratio",
        "task='News'": "did you mean news",
        "model='SmolLM2-135M'": "did you mean smollm2_135m",
    }.items():
        with pytest.raises(ConfigError, match=said):
            kvexp.compare(["h2o"], **eval(f"dict({given})"))
    with pytest.raises(ConfigError, match="did you mean h2o"):
        kvexp.compare(["H2O"])
    with pytest.raises(ConfigError, match=r"task must be a name.* kv_ratio=0.5"):
        kvexp.compare(["h2o"], 0.5)
    with pytest.raises(ConfigError, match=r"max_new_tokens; did you mean task__max_new_tokens or generation__"):
        kvexp.compare(["h2o"], max_new_tokens=5)


def test_a_class_that_stands_in_no_file_is_refused():
    """Its rows could not be told from those of its next version: of a notebook's cell, of exec(), of a function."""
    scope = {"__name__": "__main__"}
    exec(KEYDIFF, scope)
    with pytest.raises(ConfigError, match=r"KeyDiff stands in no file: .*%%writefile"):
        kvexp.compare([scope["KeyDiff"]])


def test_an_imported_class_runs_as_its_file_is_now(folder, monkeypatch):
    """What was imported before an edit would run old code under the new file's digest."""
    monkeypatch.syspath_prepend(str(folder))
    import keydiff

    first = in_its_file(keydiff.KeyDiff)
    assert first.source == load_class("method", "keydiff.py").source and first.option == "keydiff.KeyDiff"
    (folder / "keydiff.py").write_text(KEYDIFF.replace("alpha: float = 0.3", "alpha: float = 0.4"))
    again = in_its_file(keydiff.KeyDiff)
    assert again.cls().alpha == 0.4 and again.source == load_class("method", "keydiff.py").source != first.source
    inner = "    class Inner(KeyDiff):\n        def recent(self, budget):\n            return 1\n\n    return Inner\n"
    (folder / "other.py").write_text(f"{KEYDIFF}\n\ndef made():\n{inner}")
    import other

    with pytest.raises(ConfigError, match=r"made\.<locals>\.Inner stands within something else; put it at the top"):
        in_its_file(other.made())


def test_a_file_that_a_package_beside_it_hides_is_refused(folder):
    (folder / "keydiff").mkdir()
    (folder / "keydiff" / "__init__.py").write_text(KEYDIFF)
    with pytest.raises(ConfigError, match=r"keydiff\.py is hidden by .*__init__\.py, which comes first; rename one"):
        load_class("method", "keydiff.py")


def test_a_class_without_a_name_is_called_as_its_class():
    class Plain(Method):
        @property
        def score_spec(self):
            return AttentionScoreSpec()

    class Named(Plain):
        name = "named"

    assert Plain.name == "Plain" and Named.name == "named"
    made = generate(tiny("llama"), prompts_of(4, (30,)), Plain(), Budget(tokens=7))
    assert len(made.tokens) == 1


UNDECLARED = """
from kvexp.core import Method

class Mine(Method):
    def priority(self, ctx):
        return ctx.newest_attention.amax(2)
"""


def test_an_input_that_is_read_and_not_declared_is_named(folder):
    (folder / "mine.py").write_text(UNDECLARED)
    mine = load_class("method", "mine.py").cls()
    with pytest.raises(ConfigError, match=r"Mine reads ctx.newest_attention.*needs = Needs\(newest_attention=True\)"):
        generate(tiny("llama"), prompts_of(4, (30,)), mine, Budget(tokens=9), max_new_tokens=2)


def test_a_class_with_its_own_init_is_refused(folder):
    (folder / "mine.py").write_text(UNDECLARED + "    def __init__(self, alpha=0.3):\n        self.alpha = alpha\n")
    with pytest.raises(ConfigError, match=r"Mine has an __init__ of its own.*fields of a dataclass"):
        load_class("method", "mine.py")
