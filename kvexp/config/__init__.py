"""A composed Hydra configuration as checked objects. Nothing here loads a model."""
