"""Train the testbed's models from scratch.

python -m experiments.studies.testbed train [MODEL ...]     # a killed training goes on where it was
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from experiments.studies import carried_out
from kvexp.tasks.testbed import (
    ATTRIBUTES,
    END,
    GRAMMAR,
    PAD,
    START,
    SUMMARY,
    UNKNOWN,
    DocumentShape,
    answer,
    ask,
    dialogue,
    document,
    opening,
    summary,
    vocabulary,
)
from kvexp.util.errors import ConfigError
from kvexp.util.output import watch_pipes


def several(commands: Mapping[str, list[str]], workers: int) -> list[str]:
    """Run the commands, `workers` at a time and one core each; returns what went wrong, a line per training.

    Every line that a command prints is printed behind its name. An interrupt stops the commands before it passes.
    """
    one_core = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    running: list[subprocess.Popen[str]] = []

    def run(name: str) -> str | None:
        # A line of text may hold what is no character: the training must not die of it.
        how: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        child = subprocess.Popen(commands[name], env=one_core, **how)
        running.append(child)
        assert child.stdout is not None
        with child.stdout as lines:
            for line in lines:
                print(f"{name}: {line}", end="", flush=True)
        code = child.wait()
        how_it_ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{name} {how_it_ended}; what it said stands above" if code else None

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(run, name) for name in commands]
        try:
            return [why for future in futures if (why := future.result()) is not None]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in futures):  # one may have been about to start
                for child in running:
                    child.terminate()
                time.sleep(0.05)
            raise


WIDTH, LAYERS, HEADS, MLP = 128, 4, 4, 512  # of all four layouts
POSITIONS = 2048

NAMES = ("testbed_rope", "testbed_learned", "testbed_alibi", "testbed_gqa")


def config_of(name: str) -> Any:
    """The Hugging Face configuration of one of NAMES."""
    from transformers import GPT2Config, GPTJConfig, LlamaConfig, MptConfig

    words = vocabulary()
    ids = {"bos_token_id": words.index(START), "eos_token_id": words.index(END), "pad_token_id": words.index(PAD)}
    shared = {"vocab_size": len(words), "tie_word_embeddings": True, **ids}
    if name in ("testbed_rope", "testbed_learned"):
        sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_inner": MLP, "n_positions": POSITIONS}
        shared |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        if name == "testbed_rope":
            return GPTJConfig(rotary_dim=WIDTH // HEADS, **sizes, **shared)
        return GPT2Config(**sizes, **shared)
    if name == "testbed_alibi":
        sizes = {"d_model": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "expansion_ratio": MLP // WIDTH}
        return MptConfig(max_seq_len=POSITIONS, **sizes, **shared)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": MLP * 2 // 3 // 8 * 8}
    # As many kv heads as the others have: with half of them the model was still at 82 % recall after 1500 steps.
    heads = {"num_attention_heads": 2 * HEADS, "num_key_value_heads": HEADS, "head_dim": WIDTH // HEADS}
    return LlamaConfig(max_position_embeddings=POSITIONS, **sizes, **heads, **shared)


def untrained(name: str, seed: int) -> Any:
    """A model with random weights. Learned positions begin as waves: a fixed step is the same rotation anywhere."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = config_of(name)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if name == "testbed_learned":
        with torch.no_grad():
            model.transformer.wpe.weight.copy_(0.05 * waves(POSITIONS, WIDTH))
    return model


def waves(positions: int, width: int) -> torch.Tensor:
    """[positions, width]: sines and cosines of width / 2 frequencies spread evenly up to half a turn per position.

    With the geometric frequencies of Vaswani et al. 2017 (arXiv:1706.03762, section 3.5) most change too little from
    one position to the next to tell neighbours apart, and recall had not begun to form after 200 steps.
    """
    rates = (torch.arange(width // 2) + 0.5) * (2 * math.pi / width)
    angles = torch.arange(positions)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


# Questions are the hard form: a marker makes the summary easy, and learnt first it delays them.
MIXTURE = {"questions": 0.4, "summary": 0.3, "dialogue": 0.3}


@dataclass(frozen=True)
class Recipe:
    """How to train. learning rates decay linearly to a tenth over the last `cooldown` share of the steps."""

    steps: int = 2600
    seed: int = 0
    batch_tokens: int = 4096
    lr: float = 2e-3  # AdamW: embeddings, norms, biases
    muon_lr: float = 1e-2  # Muon: the hidden matrices
    warmup: int = 50
    cooldown: float = 0.4
    one_attribute: float = 0.4  # share of documents all of whose facts are of one attribute: only names tell them apart
    context_weight: float = 0.1  # of predicting a token that is no answer
    pass_mark: float = 0.9  # mean recall over the last lessons of each kind that moves the curriculum on
    every: int = 100  # steps between log lines and checkpoints


# Grouped heads and learned positions take longer until recall forms.
RECIPES = {
    "testbed_rope": Recipe(steps=2400, one_attribute=0.6),
    "testbed_learned": Recipe(steps=2800),
    "testbed_alibi": Recipe(steps=2000),
    "testbed_gqa": Recipe(steps=2400, one_attribute=0.6),
}


MODELS = Path(__file__).resolve().parents[2] / "kvexp" / "tasks" / "testbed_models"


def _train(args: argparse.Namespace) -> int:
    """0, 1 if a training failed, 130 if it was interrupted; ConfigError if one cannot begin."""
    # A training asked to end ends its children too, which Python does only of an interrupt.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    names = list(dict.fromkeys(args.models))
    if unknown := [name for name in names if name not in NAMES]:
        raise ConfigError(f"{unknown[0]} is none of {', '.join(NAMES)}")
    if args.workers < 1 or (args.steps is not None and args.steps < 1):
        raise ConfigError("--workers and --steps must be at least 1")
    if args.steps is not None and args.out.resolve() == MODELS:
        raise ConfigError(
            "--steps is for trying something out: give --out FOLDER too, kvexp's own models stay as they are"
        )
    try:
        if len(names) == 1:
            _one(names[0], args.out, args.work, args.steps)
            return 0
        options = ["--out", str(args.out), "--work", str(args.work)]
        options += [] if args.steps is None else ["--steps", str(args.steps)]
        line = [sys.executable, "-u", "-m", "experiments.studies.testbed", "train"]
        failed = several({name: [*line, name, *options] for name in names or NAMES}, args.workers)
    except KeyboardInterrupt:
        print(f"interrupted: the same command goes on from what lies in {args.work}", file=sys.stderr)
        return 130
    for words in failed:
        print(f"error: {words}", file=sys.stderr)
    return 1 if failed else 0


def _one(name: str, out: Path, work: Path, steps: int | None) -> None:
    """Train in this process; a line of text at the start and after every 100 steps."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # it warns of a missing mask, but pads stand behind the text and weigh nothing
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    recipe = RECIPES[name] if steps is None else replace(RECIPES[name], steps=steps)
    train_family(name, recipe, work, out, say)
    print(f"{recipe.steps}/{recipe.steps} done: {out / name}", flush=True)


def say(trainer: Trainer) -> None:
    """Print where a training is: a line that `several` can read."""
    state = "begins"
    if trainer.log:
        line = trainer.log[-1]
        recall = " ".join(f"{key.removeprefix('recall_')} {line[key]:.2f}" for key in line if "recall" in key)
        state = f"stage {line['stage'] + 1}, {line['seconds'] / 60:.1f} min, recall {recall}"
    print(f"{trainer.step}/{trainer.recipe.steps} {state}", flush=True)


# What the testbed's models are trained on: documents with many answers each, longer and fuller as recall grows.


KINDS = ("questions", "summary", "dialogue")
IDS = {word: number for number, word in enumerate(vocabulary())}


@dataclass(frozen=True)
class Lesson:
    """A batch of texts of one kind.

    ids [B, T] int64; weight [B, T] float32: each token's share in the loss; answered [B, T] bool: the words of answers,
    without what ends them.
    """

    ids: Tensor
    weight: Tensor
    answered: Tensor
    kind: str


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum: documents of `low` to `high` tokens with `facts[0]` to `facts[1]` facts."""

    low: int
    high: int
    facts: tuple[int, int]

    def shape(self, rng: Random) -> DocumentShape:
        tokens = rng.randint(self.low, self.high)
        most = max(self.facts[0], min(self.facts[1], tokens // 10))
        facts = rng.randint(self.facts[0], most)
        marked = rng.randint(1, min(10, (facts + 1) // 2))
        return DocumentShape(tokens, facts, marked, rng.randint(0, min(2, (facts - marked) // 2)))


# Short and dense first: on documents of full length from the start, recall does not form.
CURRICULUM = (
    Stage(8, 24, (2, 3)),
    Stage(12, 40, (2, 5)),
    Stage(16, 64, (3, 7)),
    Stage(24, 96, (3, 9)),
    Stage(32, 160, (3, 12)),
    Stage(48, 256, (4, 16)),
    Stage(64, 400, (4, 18)),
    Stage(64, 560, (4, 20)),
)


_CLOSING = torch.tensor([IDS[END], *(IDS[word] for word in GRAMMAR if not word.isalpha())])


def lesson(rng: Random, split: str, stage: Stage, kind: str, recipe: Recipe) -> Lesson:
    """A batch of one kind of text and about `batch_tokens` tokens in all; the documents of a batch have one shape."""
    shape = stage.shape(rng)
    rows: list[tuple[list[str], list[bool]]] = []
    width = 0
    while not rows or (len(rows) + 1) * width <= recipe.batch_tokens:
        rows.append(_row(rng, split, shape, kind, recipe.one_attribute))
        width = max(width, len(rows[-1][0]))
    return _batch(rows, width, kind, recipe.context_weight)


def _row(
    rng: Random, split: str, shape: DocumentShape, kind: str, one_attribute: float
) -> tuple[list[str], list[bool]]:
    """(words, which of them are answers)."""
    words: list[str] = []
    answers: list[bool] = []

    def add(text: str, is_answer: bool = False) -> None:
        new = text.split()
        words.extend(new)
        answers.extend([is_answer] * len(new))

    if kind == "dialogue":
        # As many requests as a conversation of this length bears: the last one alone would teach little per token.
        pieces = dialogue(rng, split, shape, recalls=rng.randint(1, 4), per_recall=rng.randint(1, 4))
        for number, piece in enumerate(pieces):
            add(piece, number % 2 == 1)
        return words, answers
    # With one attribute for all facts nothing but the name tells them apart: else names are learnt late.
    doc = document(rng, split, shape, rng.choice(list(ATTRIBUTES)) if rng.random() < one_attribute else None)
    add(opening(doc.text))
    if kind == "summary":
        add(SUMMARY)
        add(f" {summary(doc.marked)} {END}", True)
    facts = doc.current()
    rng.shuffle(facts)
    for fact in facts[: 16 if kind == "questions" else 4]:
        add(ask(fact))
        add(answer(fact), True)
    return words, answers


def _batch(rows: list[tuple[list[str], list[bool]]], width: int, kind: str, context_weight: float) -> Lesson:
    ids = torch.full((len(rows), width), IDS[PAD], dtype=torch.int64)
    answered = torch.zeros(len(rows), width, dtype=torch.bool)
    for place, (words, answers) in enumerate(rows):
        ids[place, : len(words)] = torch.tensor([IDS[word] for word in words])
        answered[place, : len(words)] = torch.tensor(answers)
    weight = torch.where(answered, 1.0, context_weight).masked_fill(ids == IDS[PAD], 0.0)
    return Lesson(ids, weight, answered & ~torch.isin(ids, _CLOSING), kind)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word between spaces. Adds nothing by itself: the prompt forms write their start token."""
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(vocabulary())}, unk_token=UNKNOWN))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.add_special_tokens([AddedToken(word, special=True) for word in (PAD, START, END, UNKNOWN)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=START,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def export(model: Any, folder: Path, log: Path, facts: dict[str, Any]) -> None:
    """Write the folder whole or not at all. facts: how it was trained, JSON values."""
    draft = folder.with_name(folder.name + ".part")
    shutil.rmtree(draft, ignore_errors=True)
    half = {name: tensor.to(torch.float16) for name, tensor in model.state_dict().items()}
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(draft, state_dict=half)
    tokenizer().save_pretrained(draft)
    shutil.copy(log, draft / "training.jsonl")
    (draft / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)


class Trainer:
    """One family's training. The data of step i depend on (seed, i) and the stage alone: a resumed run is the same."""

    def __init__(self, name: str, recipe: Recipe, folder: Path, device: str = "cpu") -> None:
        self.name, self.recipe, self.folder = name, recipe, folder
        self.model = untrained(name, recipe.seed).to(device)
        self.optimizers = optimizers(self.model, recipe)
        self.step, self.stage, self.seconds = 0, 0, 0.0
        self.recall = dict.fromkeys(KINDS, 0.0)
        self.log: list[dict[str, Any]] = []
        self._resume()

    def run(self, say: Callable[[Trainer], None]) -> None:
        """Train to the end of the recipe; `say` is called after every step that logs."""
        while self.step < self.recipe.steps:
            start = time.perf_counter()
            self._one()
            self.seconds += time.perf_counter() - start
            if self.step % self.recipe.every == 0 or self.step == self.recipe.steps:
                self._note()
                self._save()
                say(self)

    def _one(self) -> None:
        recipe = self.recipe
        rng = Random(f"{recipe.seed} {self.step}")
        kind = rng.choices(KINDS, [MIXTURE[kind] for kind in KINDS])[0]
        # A quarter of the lessons come from earlier stages, so that short documents stay known.
        stage = self.stage if rng.random() < 0.75 else rng.randint(0, self.stage)
        batch = lesson(rng, "train", CURRICULUM[stage], kind, recipe)
        rate = schedule(self.step, recipe)
        for optimizer, base in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = base * rate
        loss, right = loss_of(self.model, self.name, batch, rng, reach=2 * CURRICULUM[self.stage].high)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, _ in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if stage == self.stage:
            self.recall[kind] += 0.1 * (right - self.recall[kind])
        self.step += 1
        if min(self.recall.values()) >= recipe.pass_mark and self.stage + 1 < len(CURRICULUM):
            self.stage += 1
            self.recall = {kind: value - 0.1 for kind, value in self.recall.items()}

    def _note(self) -> None:
        line = {"step": self.step, "stage": self.stage, "seconds": round(self.seconds, 1)}
        self.log.append({**line, **{f"recall_{kind}": round(value, 4) for kind, value in self.recall.items()}})

    # -- resuming -----------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "recipe": asdict(self.recipe),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
            "progress": [self.step, self.stage, self.seconds, self.recall, self.log],
        }
        lines = "".join(json.dumps(line) + "\n" for line in self.log)
        (self.folder / "training.jsonl").write_text(lines)  # first: no finished training may lack its last line
        draft = self.folder / "checkpoint.part"
        torch.save(state, draft)
        draft.replace(self.folder / "checkpoint.pt")

    def _resume(self) -> None:
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, weights_only=True, map_location=self.model.device)
        if state["recipe"] != asdict(self.recipe):
            raise ConfigError(f"{path} is of another recipe: remove {self.folder} to train anew, or give --work")
        self.model.load_state_dict(state["model"])
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.stage, self.seconds, self.recall, self.log = state["progress"]


def optimizers(model: nn.Module, recipe: Recipe) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon (Jordan et al. 2024) for the matrices inside the layers, AdamW for the rest; each with its base rate."""
    hidden: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        inside = parameter.ndim == 2 and not any(word in name for word in ("wte", "wpe", "embed_tokens", "lm_head"))
        (hidden if inside else rest).append(parameter)
    return [
        (torch.optim.Muon(hidden, lr=recipe.muon_lr, weight_decay=0.01, adjust_lr_fn="original"), recipe.muon_lr),
        (torch.optim.AdamW(rest, lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.0), recipe.lr),
    ]


def schedule(step: int, recipe: Recipe) -> float:
    """Share of the base learning rate at a step."""
    rising = min(1.0, (step + 1) / recipe.warmup)
    left = (recipe.steps - step) / (recipe.cooldown * recipe.steps)
    return rising * min(1.0, 0.1 + 0.9 * left)


def loss_of(model: Any, name: str, batch: Lesson, rng: Random, reach: int = 0) -> tuple[Tensor, float]:
    """(weighted mean cross-entropy, share of answer tokens that are the most probable ones).

    reach: how far from the start of a table of learned positions the text may be put.
    """
    options: dict[str, Tensor] = {}
    ids, weight, answered = (tensor.to(model.device) for tensor in (batch.ids, batch.weight, batch.answered))
    length = ids.shape[1]
    if name == "testbed_learned":
        # Learned positions are learnt one by one: short documents teach positions beyond their own length too.
        first = rng.randint(0, min(reach, POSITIONS - length))
        options["position_ids"] = torch.arange(length, device=ids.device)[None] + first
    with torch.autocast(ids.device.type, torch.bfloat16):  # half the time; weights and their updates stay float32
        logits = model(ids, use_cache=False, **options).logits[:, :-1].float()
    target, weight, answered = ids[:, 1:], weight[:, 1:], answered[:, 1:]
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(weight)
    right = (logits.argmax(-1) == target)[answered].float().mean().item()
    return (losses * weight).sum() / weight.sum(), right


def train_family(name: str, recipe: Recipe, work: Path, out: Path, say: Callable[[Trainer], None]) -> None:
    """Train `name` (resuming what lies in `work`) and write `out / name`; `say` is called first and as it goes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with folder_lock(work / name):
        trainer = Trainer(name, recipe, work / name, device)
        say(trainer)
        trainer.run(say)
        export(trainer.model, out / name, trainer.folder / "training.jsonl", facts(trainer))


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the folder of a training: two processes would overwrite each other's checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another process trains in {folder}: wait for it or end it, or give --work") from error
        yield


def facts(trainer: Trainer) -> dict[str, Any]:
    """What training.json says of a training: recipe, size, time, validation, versions."""
    device = trainer.model.device
    return {
        **asdict(trainer.recipe),
        "steps": trainer.step,
        "layout": trainer.model.config.model_type,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "stage": trainer.stage,
        "tokens": trainer.step * trainer.recipe.batch_tokens,
        "seconds": round(trainer.seconds),
        "validation_recall": {kind: round(recall(trainer, kind), 4) for kind in KINDS},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})",
        "torch": torch.__version__,
        "commit": _described(),
    }


@torch.no_grad()
def recall(trainer: Trainer, kind: str, batches: int = 8) -> float:
    """Mean share of right answer tokens over lessons of the last stage from the validation split."""
    total = 0.0
    for number in range(batches):
        rng = Random(f"validation {kind} {number}")
        batch = lesson(rng, "validation", CURRICULUM[trainer.stage], kind, trainer.recipe)
        total += loss_of(trainer.model, trainer.name, batch, rng)[1]
    return total / batches


def _described() -> str | None:
    with contextlib.suppress(OSError):
        line = ["git", "describe", "--always", "--dirty"]
        where = Path(__file__).resolve().parents[2]
        if (where / ".git").exists():
            return subprocess.run(line, cwd=where, capture_output=True, text=True).stdout.strip() or None
    return None


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 after printing an error."""
    parser = argparse.ArgumentParser(prog="python -m experiments.studies.testbed")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train the testbed's models from scratch, or go on where they were")
    train.set_defaults(command=_train)
    train.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(NAMES)}; default: all")
    train.add_argument("--out", type=Path, default=MODELS, help="where the model folders go (default: kvexp's own)")
    train.add_argument("--work", type=Path, default=Path("outputs/.training"), help="checkpoints while training")
    train.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="models at a time, one core each")
    train.add_argument("--steps", type=int, help="another number of steps than the recipe's, to try something out")
    return carried_out(parser, words)


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
