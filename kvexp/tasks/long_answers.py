"""Long answers: a story to go on with and facts to list, as long as the model likes, to see what becomes of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

from kvexp.articles import Article, articles, articles_digest
from kvexp.errors import ConfigError
from kvexp.tasks.base import Example, Task
from kvexp.tasks.loops import first_loop, repeated_share
from kvexp.tasks.metrics import unspaced_letters

KINDS = ("story", "facts")


@dataclass(frozen=True, kw_only=True)
class LongAnswers(Task):
    """Two long answers to each of 36 fictional articles of kvexp.articles: go on with its beginning as a story
    (`story`), and list all of its facts, one a line (`facts`). There is no reference.

    Scores in percent: `not_repeated`, 100 less the share of 4-grams of words that stood in the answer before;
    `loop_free`, the share of its words before the first loop, 100 where there is none (`kvexp.tasks.loops`). An empty
    answer repeats nothing: how long answers are, and whether they end, stands beside the scores. Budgets are best given
    in tokens: the answer is longer than the prompt. `limit` counts answers.
    """

    name: ClassVar[str] = "long_answers"
    generated: ClassVar[bool] = True
    metrics: ClassVar[tuple[str, ...]] = ("not_repeated", "loop_free")

    kinds: tuple[str, ...] = KINDS
    max_new_tokens: int = 1024

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        each = ((article, kind) for article in articles() for kind in self.kinds)
        for article, kind in islice(each, self.limit):
            yield f"article {article.id}, {kind}", {"article": article, "kind": kind}

    def example(self, row: dict[str, Any], where: str) -> Example:
        article, kind = row["article"], row["kind"]
        prefix, body, suffix = _story(article) if kind == "story" else _facts(article)
        name = f"{article.id} {kind}"
        info = {"article": article.id, "kind": kind}
        return Example(name, prefix + body + suffix, "", prefix=prefix, body=body, suffix=suffix, info=info)

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        words = output.lower().split()
        loop = first_loop(words)
        return {
            "not_repeated": 100 * (1 - repeated_share(words)),
            "loop_free": 100.0 if loop is None else 100 * loop.start / len(words),
        }

    def of_answer(self, output: str, reference: str) -> dict[str, Any]:
        """`unspaced_letters`: of scripts without spaces, which scores take for parts of words; where there are any."""
        return {"unspaced_letters": count} if (count := unspaced_letters(output)) else {}

    def fingerprint(self) -> str:
        return f"articles:{articles_digest()}"

    def check_options(self) -> None:
        super().check_options()
        if not self.kinds or len(set(self.kinds)) < len(self.kinds) or not set(self.kinds) <= set(KINDS):
            raise ConfigError(f"task.kinds must be one or both of {', '.join(KINDS)}, got {list(self.kinds)}")
        if self.sample != "first":
            raise ConfigError(
                f"task.sample must be first for long_answers, got {self.sample!r}: its rows have an order"
            )


def _story(article: Article) -> tuple[str, str, str]:
    """The article's first half, to go on with."""
    half = article.paragraphs[: max(1, len(article.paragraphs) // 2)]
    return "Here is the beginning of a story.\n\n", "\n".join(half), "\n\nGo on with this story. Make it long.\n"


def _facts(article: Article) -> tuple[str, str, str]:
    """The whole article, to take apart."""
    return (
        "Read the following article.\n\n",
        article.text,
        "\n\nList every fact of this article, one a line, as many as there are.\n",
    )
