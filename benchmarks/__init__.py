"""Benchmarks of speed and memory, as ratios measured in one run; no test asserts these numbers."""
