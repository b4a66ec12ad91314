"""The orders of C++'s library against the library itself, compiled here, and against what it gave when recorded."""

from __future__ import annotations

import random
import shutil
import subprocess

import pytest

from kvexp.core.cpp_order import ascending, largest

PROGRAM = """
#include <algorithm>
#include <iostream>
#include <numeric>
#include <vector>
int main() {
    size_t n, k;
    while (std::cin >> n >> k) {
        std::vector<double> x(n);
        for (auto& v : x) std::cin >> v;
        std::vector<size_t> i(n), j(n);
        std::iota(i.begin(), i.end(), 0);
        j = i;
        std::sort(i.begin(), i.end(), [&](size_t a, size_t b) { return x[a] < x[b]; });
        std::partial_sort(j.begin(), j.begin() + k, j.end(), [&](size_t a, size_t b) { return x[a] > x[b]; });
        std::sort(j.begin(), j.begin() + k);
        for (auto v : i) std::cout << v << ' ';
        for (size_t v = 0; v < k; v++) std::cout << j[v] << ' ';
        std::cout << std::endl;
    }
}
"""


def cases():
    draw = random.Random(0)
    for _ in range(400):
        size = draw.randint(1, 150)
        yield [draw.randint(0, draw.choice([2, 5, 30, 1000])) for _ in range(size)], draw.randint(0, size)


RECORDED = ([19, 2, 17, 6, 14, 8, 12, 10, 18, 15, 11, 7, 3, 1, 0, 9, 13, 5, 16, 4], [0, 1, 3, 4, 5, 7, 9, 11, 13, 16])


def test_as_recorded():
    """20 keys of 3 values: 16 and fewer are stable, these are not."""
    keys = [2, 1, 0, 1, 2, 2, 0, 1, 0, 2, 1, 1, 0, 2, 0, 1, 2, 0, 1, 0]
    assert ascending(keys) == RECORDED[0]
    assert sorted(largest(keys, 10)) == RECORDED[1]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, which brings the library")
def test_against_the_library(tmp_path):
    (tmp_path / "order.cpp").write_text(PROGRAM, "utf-8")
    subprocess.run(["g++", "-O1", "-o", tmp_path / "order", tmp_path / "order.cpp"], check=True)
    asked = list(cases())
    lines = "".join(f"{len(keys)} {count} {' '.join(map(str, keys))}\n" for keys, count in asked)
    done = subprocess.run([tmp_path / "order"], input=lines, text=True, capture_output=True, check=True)
    for (keys, count), line in zip(asked, done.stdout.splitlines(), strict=True):
        found = list(map(int, line.split()))
        assert ascending(keys) == found[: len(keys)], keys
        assert sorted(largest(keys, count)) == found[len(keys) :], (keys, count)
