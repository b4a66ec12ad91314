"""kvexp: which tokens may a language model forget while it generates, and what does that cost and win?"""

__version__ = "0.2.0.dev0"

# Bumped by every change that can move a number; part of the identity of a run.
NUMERICS = 6
