"""Trains the testbed's models from scratch: `kvexp train-testbed`."""
