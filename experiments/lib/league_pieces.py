"""The pieces of the league of methods: which sweeps there are, and which methods fit into memory together.

A piece is one sweep: a task, whether eviction sees the question, and methods at four budgets. What it holds at once
is its caches at the longest prompt of the task; `MOST_BYTES` of them at most, so that no piece needs a larger machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvexp.results.read import AFTER_EVICTION, IN_PROMPT

RATIOS = (0.125, 0.25, 0.5, 0.75)
QUESTIONS = (AFTER_EVICTION, IN_PROMPT)
LONGEST = {"news": 1200, "news_qa": 1200, "cnn_dailymail": 1920, "needle": 8000}  # tokens of a prompt, by task
TOKEN_BYTES = 30 * 3 * 64 * 2 * 4  # of a slot of SmolLM2-135M in all layers: 30 layers, 3 kv heads, keys and values
MOST_BYTES = 4 << 30  # as much again is held for the texts that are forced, where answers are written too

OLD = [
    "random",
    "window",
    "dilated_window",
    "streaming_llm",
    "h2o",
    "keyformer",
    "a2sf",
    "tova",
    "spatten",
    "snapkv",
    "knorm",
    "vatp",
]
NEW = [
    "keydiff",
    "lagkv",
    "cur",
    "compactor",
    "caote",
    "expected_attention",
    "qfilters",
    "pyramidkv",
    "cake",
    "kvzap",
]
EVERY_128 = ["triattention", "rkv"]
READ_TWICE = ["kvzip", "kvzip_plus"]
ADAPTIVE = ["snapkv", "expected_attention"]
KEEP_ALL = ["ideal", "pqcache", "sparq", "quest", "infllm"]
# A chunk is fed behind the prompt, and behind 8,000 tokens the model's 8,192 positions have no room for 2,000 more.
SHORT_CHUNKS = ("method.chunk=128",)
# Prompts of news have a few hundred tokens, an eighth of which kvpress's 128 and 256 would overrun.
DUO = ("budget.heads=duo", "budget.stream_sinks=4", "budget.stream_recent=28")
LEFT_OUT = {
    "full": "what all are measured against",
    "h2o_c": "it takes more slots than the budget",
    "h2o_keyformer_paper": "h2o with another recent window",
    "h2o_damping": "an ablation of h2o",
    "key_attention": "an ablation of h2o",
    "keyformer_a2sf": "an ablation of keyformer",
    "oracle": "ideal once more: the exact top of every query",
}


@dataclass(frozen=True)
class MethodGroup:
    """Methods that are run in one sweep. words: overrides that all of them get; keeps_all: they hold every token.

    label: what the page puts behind a method's name for these words, "" nothing; tasks: those the group is run on.
    """

    name: str
    methods: tuple[str, ...]
    words: tuple[str, ...] = ()
    keeps_all: bool = False
    label: str = ""
    tasks: tuple[str, ...] = tuple(LONGEST)

    @property
    def bytes_per_token(self) -> float:
        """Of one method at all budgets, per token of a prompt."""
        return TOKEN_BYTES * (len(RATIOS) if self.keeps_all else sum(RATIOS))


GROUPS = (
    MethodGroup("old", tuple(OLD)),
    MethodGroup("new", tuple(NEW)),
    # Their papers evict every 128 tokens; at every step R-KV, which compares all keys, takes longer than all others.
    MethodGroup("every_128", tuple(EVERY_128), ("cache.evict_every=128",)),
    MethodGroup("read_twice", tuple(READ_TWICE), tasks=("news", "news_qa", "cnn_dailymail")),
    MethodGroup("short_chunks", tuple(READ_TWICE), SHORT_CHUNKS, label="chunk128", tasks=("needle",)),
    MethodGroup("adaptive", tuple(ADAPTIVE), ("budget.heads=adaptive",), label="adaptive"),
    MethodGroup("duo", ("h2o",), DUO, label="duo"),
    MethodGroup("keep_all", tuple(KEEP_ALL), keeps_all=True),
)


@dataclass(frozen=True)
class Piece:
    """One sweep of the league: overrides of `experiment=real/league_TASK`."""

    task: str
    question: str
    group: MethodGroup
    methods: tuple[str, ...]

    @property
    def name(self) -> str:
        """As it is asked for and told: task, question, group, and the first method where a group has several pieces."""
        first = "" if self.methods == self.group.methods else f"/{self.methods[0]}"
        return f"{self.task}/{self.question}/{self.group.name}{first}"

    @property
    def words(self) -> tuple[str, ...]:
        """The overrides, without where rows are from and where runs go."""
        return (f"task.question={self.question}", f"method={','.join(self.methods)}", *self.group.words)


def pieces(
    tasks: Sequence[str], only: Sequence[str] = (), questions: Sequence[str] = QUESTIONS, *, answers: bool = True
) -> list[Piece]:
    """Every piece of these tasks; only: of these methods; questions: where the question stands.

    answers: whether answers are written beside the divergence; without them twice as many methods go together.
    """
    return [
        Piece(task, question, group, part)
        for task in tasks
        for question in questions
        for group in GROUPS
        if task in group.tasks
        for part in parts_by_memory(group, LONGEST[task], only, MOST_BYTES if answers else 2 * MOST_BYTES)
    ]


def parts_by_memory(
    group: MethodGroup, tokens: int, only: Sequence[str] = (), most_bytes: int = MOST_BYTES
) -> Iterator[tuple[str, ...]]:
    """The methods of a group in parts whose caches take at most so many bytes at prompts of so many tokens."""
    methods = [name for name in group.methods if not only or name in only]
    most = max(1, int(most_bytes / (group.bytes_per_token * tokens)))
    count = -(-len(methods) // most)
    ends = [len(methods) * (place + 1) // count for place in range(count)]
    for start, end in zip([0, *ends], ends, strict=False):
        yield tuple(methods[start:end])
