"""Keyformer (arXiv:2403.09054): one module per figure or table."""
