"""The command `kvexp calibrate`: a model reads texts once, and the statistics of its queries are kept for methods."""
