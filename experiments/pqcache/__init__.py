"""PQCache (arXiv:2407.12820): one module per figure or table."""
