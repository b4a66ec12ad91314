"""LongBench's 21 data sets (Bai et al., arXiv:2308.14508, MIT): prompt, answer length and metric of each.

The prompts are those of config/dataset2prompt.json in github.com/THUDM/LongBench, to the letter: "asconcisely", the
spaces at line ends and the missing newline before "Next line of code" are theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvexp.tasks import longbench_metrics as metrics

Metric = Callable[[str, str, Sequence[str]], float]


@dataclass(frozen=True)
class Subset:
    """One data set. chat: whether a chat model's template goes around its prompts; first_line: whether only the first
    line of an answer counts; in_14: whether it is among the 14 that PQCache averages (arXiv:2407.12820, table 2)."""

    prompt: str
    metric: Metric
    max_new_tokens: int
    chat: bool = True
    first_line: bool = False
    in_14: bool = True
    extended: bool = True  # has a LongBench-E version


_BRIEF = "Only give me the answer and do not output any other words."
_PASSAGES = (
    f"Answer the question based on the given passages. {_BRIEF}\n\nThe following are given passages.\n{{context}}\n\n"
    f"Answer the question based on the given passages. {_BRIEF}\n\nQuestion: {{input}}\nAnswer:"
)
_STORY = "as you can, using a single phrase if possible. Do not provide any explanation.\n\n"
_ARTICLE = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based "
    'on the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", '
    '"no", or "unanswerable". Do not provide any explanation.\n\n'
)
_PARAGRAPHS = (
    "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
    "these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other words, "
    "how many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the final count of unique "
    "paragraphs after removing duplicates. The output format should only contain the number, such as 1, 2, 3, and so "
    "on.\n\nThe final answer is: "
)
_ABSTRACT = (
    "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract is "
    "from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph that "
    'the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: '
)

SUBSETS: dict[str, Subset] = {
    "narrativeqa": Subset(
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question "
        f"asconcisely {_STORY}Story: {{context}}\n\nNow, answer the question based on the story asconcisely {_STORY}"
        "Question: {input}\n\nAnswer:",
        metrics.qa_f1,
        128,
        extended=False,
    ),
    "qasper": Subset(
        f"You are given a scientific article and a question. Answer the question {_ARTICLE}Article: {{context}}\n\n "
        f"Answer the question based on the above article {_ARTICLE}Question: {{input}}\n\nAnswer:",
        metrics.qa_f1,
        128,
    ),
    "multifieldqa_en": Subset(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the "
        "above text, only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:",
        metrics.qa_f1,
        64,
    ),
    "hotpotqa": Subset(_PASSAGES, metrics.qa_f1, 32),
    "2wikimqa": Subset(_PASSAGES, metrics.qa_f1, 32),
    "musique": Subset(_PASSAGES, metrics.qa_f1, 32, extended=False),
    "gov_report": Subset(
        "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n{context}"
        "\n\nNow, write a one-page summary of the report.\n\nSummary:",
        metrics.rouge_l,
        512,
    ),
    "qmsum": Subset(
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one "
        "or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting transcript "
        "in one or more sentences.\n\nQuery: {input}\nAnswer:",
        metrics.rouge_l,
        512,
        extended=False,
    ),
    "multi_news": Subset(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
        "Now, write a one-page summary of all the news.\n\nSummary:",
        metrics.rouge_l,
        512,
    ),
    "trec": Subset(
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}",
        metrics.classification,
        64,
        chat=False,
        first_line=True,
    ),
    "triviaqa": Subset(
        f"Answer the question based on the given passage. {_BRIEF} The following are some examples.\n\n"
        "{context}\n\n{input}",
        metrics.qa_f1,
        32,
        chat=False,
        first_line=True,
    ),
    "samsum": Subset(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}",
        metrics.rouge_l,
        128,
        chat=False,
        first_line=True,
    ),
    "passage_count": Subset(_PARAGRAPHS, metrics.count, 32),
    "passage_retrieval_en": Subset(_ABSTRACT, metrics.retrieval, 32),
    "lcc": Subset(
        "Please complete the code given below. \n{context}Next line of code:\n",
        metrics.code_similarity,
        64,
        chat=False,
        in_14=False,
    ),
    "repobench-p": Subset(
        "Please complete the code given below. \n{context}{input}Next line of code:\n",
        metrics.code_similarity,
        64,
        chat=False,
        in_14=False,
    ),
    "multifieldqa_zh": Subset(
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n"  # noqa: RUF001
        "现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。\n\n问题：{input}\n回答：",  # noqa: RUF001
        metrics.qa_f1_zh,
        64,
        in_14=False,
        extended=False,
    ),
    "dureader": Subset(
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n"  # noqa: RUF001
        "请基于上述文章回答下面的问题。\n\n问题：{input}\n回答：",  # noqa: RUF001
        metrics.rouge_l_zh,
        128,
        in_14=False,
        extended=False,
    ),
    "vcsum": Subset(
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n会议总结：",  # noqa: RUF001
        metrics.rouge_l_zh,
        512,
        in_14=False,
        extended=False,
    ),
    "lsht": Subset(
        "请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}",  # noqa: RUF001
        metrics.classification,
        64,
        chat=False,
        first_line=True,
        in_14=False,
        extended=False,
    ),
    "passage_retrieval_zh": Subset(
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n"  # noqa: RUF001
        '下面是一个摘要\n\n{input}\n\n请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n答案是：',  # noqa: RUF001
        metrics.retrieval,
        32,
        in_14=False,
        extended=False,
    ),
}
CHINESE_WORDS = (metrics.qa_f1_zh, metrics.rouge_l_zh)
