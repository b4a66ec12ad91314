"""Trains the testbed's models from scratch: `python -m kvexp.training`."""
