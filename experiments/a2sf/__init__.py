"""A2SF (arXiv:2407.20485): one module per figure or table."""
