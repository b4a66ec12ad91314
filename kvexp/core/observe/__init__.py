"""Observation: the attention that each slot receives, summed over queries, as methods accumulate it."""
