"""The command `kvexp calibrate`: a model reads texts once, and the statistics of its queries and heads are kept."""
