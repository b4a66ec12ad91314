"""Observation: column sums of attention, that is, what each slot receives, summed over query rows."""
