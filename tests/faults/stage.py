"""Processes that run the command line and can be hurt, forked off one that has loaded everything: so each is quick.

A child is a process of its own from the fork on: it takes its locks, writes its files and dies like `python run.py`.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENV = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200", "TOKENIZERS_PARALLELISM": "false"}
PACKAGES = ("torch", "pandas", "hydra", "rich.progress", "rich.table", "safetensors.torch", "platformdirs")
PACKAGES += ("rouge_score.rouge_scorer", "xml.sax", "importlib.readers")
CLASSES = ("AutoModelForCausalLM", "AutoTokenizer", "GenerationConfig", "PreTrainedTokenizerFast", "StopStringCriteria")
CLASSES += ("GPT2LMHeadModel", "GPTJForCausalLM", "LlamaForCausalLM", "MptForCausalLM")
OURS = ("main", "jobs", "batches", "plan", "answers", "prompts", "model_spec", "store")  # of kvexp.run
TWO_THREADS = "import torch; torch.set_num_threads(2)\n"  # before a child begins


class Child:
    """One run of the command line. before: Python source that is executed in it first; bare: and before kvexp loads."""

    def __init__(self, stage, words, out, before="", bare=False, env=None):
        self.stage, self.out, self.bare = stage, Path(out), bare
        self.out.touch()
        order = {"words": list(words), "out": str(self.out), "before": before, "env": env or {}}
        self.pid = stage.ask({"bare": bare, "start": order})
        self.status = None

    def send(self, number):
        """Send a signal; nothing happens where it has ended already."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def poll(self):
        """Its exit code, minus the signal's number if one killed it; None while it runs."""
        if self.status is None:
            self.status = self.stage.ask({"bare": self.bare, "poll": self.pid})
        return self.status

    def wait(self, timeout=240.0):
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                self.send(signal.SIGKILL)
                raise TimeoutError(f"still running after {timeout} s: {self.said}")
            time.sleep(0.02)
        return self.status

    @property
    def said(self):
        """Both streams, in the order in which they came."""
        return self.out.read_text()

    def until(self, words, timeout=120.0):
        """Waits until it has said this, or is over."""
        end = time.monotonic() + timeout
        while words not in self.said:
            assert self.poll() is None and time.monotonic() < end, f"never said {words!r}: {self.said}"
            time.sleep(0.01)


class Stage:
    """The process that has loaded everything. Use as a context manager; ends what it started."""

    def __init__(self):
        pipe = subprocess.PIPE
        line = [sys.executable, str(Path(__file__).resolve())]
        env = os.environ | ENV | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(line, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, text=True)
        assert json.loads(self.process.stdout.readline()) == "loaded"  # a child's time shall be its own

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()

    def start(self, words, out, before="", bare=False, **env):
        return Child(self, words, out, before, bare, env)

    def run(self, words, out, before="", bare=False, **env):
        """(exit code, what was said)."""
        child = self.start(words, out, before, bare, **env)
        return child.wait(), child.said

    def ask(self, order):
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def _main():
    """Orders on stdin, answers on stdout. Bare children are forked here, the others off a fork that has kvexp too."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and this one what nohup started
    _load()
    (orders, to_loaded), (from_loaded, told) = os.pipe(), os.pipe()
    if not (loaded := os.fork()):
        answers.close()
        os.close(to_loaded)
        _load_ours()
        _serve(os.fdopen(orders), os.fdopen(told, "w"))
        os._exit(0)
    os.close(orders)
    os.close(told)
    with os.fdopen(to_loaded, "w", buffering=1) as to_loaded, os.fdopen(from_loaded) as from_loaded:

        def elsewhere(line):
            to_loaded.write(line)
            return from_loaded.readline()

        answers.write(elsewhere("{}\n"))  # once it has loaded
        answers.flush()
        _serve(sys.stdin, answers, elsewhere)
    os.waitpid(loaded, 0)


def _serve(orders, answers, elsewhere=None):
    """Answer each order, a line of JSON, until there are no more. elsewhere(line): answers where none is to be bare."""
    import runpy

    gc.freeze()  # a child's collections would look through it, and copy it
    children = {}
    for line in orders:
        order = json.loads(line)
        if elsewhere is not None and not order["bare"]:
            answers.write(elsewhere(line))
            answers.flush()
            continue
        answer = "loaded"
        if "start" in order:
            pid = os.fork()
            if not pid:
                answers.close()
                _become(runpy, **order["start"])
            children[pid] = None
            answer = pid
        elif "poll" in order:
            answer = _status(order["poll"])
            if answer is not None:
                del children[order["poll"]]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _load():
    """Import what other people wrote."""
    for name in PACKAGES:
        importlib.import_module(name)
    transformers = importlib.import_module("transformers")
    for name in CLASSES:
        getattr(transformers, name)  # imports the module that defines it


def _load_ours():
    """Import kvexp as a sweep does."""
    from hydra.core.plugins import Plugins

    for name in (*(f"kvexp.run.{name}" for name in OURS), "kvexp.results.sweep_callback", "kvexp.results.screen"):
        importlib.import_module(name)
    Plugins.instance()  # registers them


def _status(pid):
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _become(runpy, words, out, before, env):
    """This process is `python run.py words` now."""

    def run():
        exec(compile(before, "<before>", "exec"), {})
        runpy.run_path(str(ROOT / "run.py"), run_name="__main__")

    os.environ.update(env)
    run_as_program(out, ["run.py", *words], run)


def run_as_program(out, argv, run):
    """Call `run` as a program of its own, with these words and its output behind the file `out`; ends this process."""
    code = 1
    try:
        file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = os.fdopen(1, "w", buffering=1)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        sys.argv = argv
        run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _main()
