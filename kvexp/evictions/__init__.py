"""The log of what a run evicted: its files, and what was still held at a step. Written by kvexp.diagnose; no torch."""
