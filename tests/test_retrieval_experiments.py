"""The tables of recall and of cache hits, on a tiny model: plausible ends, and what must hold whatever the model."""

import pytest
import torch
from tiny import prompts_of, tiny

from benchmarks.pq_selection import main as selection
from experiments.cache_hits import main as cache_hits
from experiments.cache_hits import rates
from experiments.lib.long_texts import long_text
from experiments.pq_recall import main as pq_recall
from experiments.pq_recall import recall
from kvexp.models import load_tokenizer


def test_recall_rises_with_bits_and_is_one_where_nothing_is_lost():
    """29 keys: 2 clusters know little, and 8 bits are more centroids than keys, which the method searches exactly."""
    model = tiny("llama")
    found = recall(model, prompts_of(3, [47, 45]), [1, 7], [1, 3, 5], 0.4, 5)
    assert set(found) == {"1x1", "1x3", "1x5", "7x1", "7x3", "7x5", "random"}
    assert all(0 <= value <= 1 for value in found.values())
    assert found["1x1"] < found["7x5"]
    assert found["random"] < found["1x3"] < found["7x3"]


def test_a_cache_for_everything_hits_what_was_asked_for_before():
    """All blocks noted at every step and room for all: whatever lies in a block touched before is a hit."""
    found = rates(tiny("llama"), prompts_of(3, [41]), [1, 50], 2, 200, 0.4, 8, 2)
    assert set(found) == {("lru", 1), ("lru", 50), ("lfu", 1), ("lfu", 50)}
    assert found["lru", 50] == found["lfu", 50] > found["lru", 1]
    assert all(0 <= rate < 1 for rate in found.values())


@pytest.mark.parametrize("model", ["testbed_gqa", "testbed_rope"])
def test_recall_is_a_command_that_needs_nothing(model, capsys):
    """On a model of every kind of head: some configurations have no field for the size of one."""
    options = ["--tokens", "96", "--documents", "1", "--new", "3", "--m", "2", "--b", "2", "4"]
    assert pq_recall(["--model", model, *options]) == 0
    head, _, _, row, chance = capsys.readouterr().out.splitlines()
    assert head == f"recall@k, {model}, kv_ratio=0.2, 1 documents of 96 tokens"
    low, high = map(float, row.split("|")[2:4])
    assert float(chance.split(": ")[1]) < low < high < 1


def test_hit_rates_are_a_command_that_needs_nothing(capsys):
    options = ["--tokens", "96", "--documents", "1", "--new", "6", "--block", "4", "--capacity", "16"]
    assert cache_hits([*options, "--per-step", "1", "4"]) == 0
    head, _, _, lru, lfu = capsys.readouterr().out.splitlines()
    assert head == "hit rate, testbed_gqa, blocks of 4, 16 tokens, kv_ratio=0.1, 1 documents of 96 tokens"
    for name, line in (("lru", lru), ("lfu", lfu)):
        assert line.startswith(f"| {name} |")
        assert all(0 <= float(cell) <= 1 for cell in line.split("|")[2:4])


def test_long_texts_are_of_the_testbeds_language_and_of_one_length():
    tokenizer = load_tokenizer("kvexp/testbed/models/testbed_gqa")
    one, other, again = (long_text(tokenizer, 1024, number) for number in (0, 1, 0))
    assert len(one) == len(other) == 1024
    assert one == again != other
    assert tokenizer.unk_token_id not in one + other


def test_the_benchmark_runs(capsys, tmp_path):
    threads = torch.get_num_threads()
    line = [
        "--slots",
        "70",
        "--heads",
        "2",
        "--group",
        "1",
        "--dim",
        "8",
        "--b",
        "3",
        "--repeats",
        "3",
        "--threads",
        "1",
    ]
    try:
        assert selection([*line, "--json", str(tmp_path / "rows.json")]) == 0
    finally:
        torch.set_num_threads(threads)
    assert "| 70 |" in capsys.readouterr().out
    assert (tmp_path / "rows.json").is_file()
