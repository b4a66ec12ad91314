"""The papers' figures and tables made again, a folder per paper, and the commands that make, list and check them."""

from kvexp.util.machine import watch_torch

watch_torch()
