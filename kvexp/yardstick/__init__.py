"""Is the baseline the model that others measured? Its full cache under a published protocol, against their number.

A verdict in percent of a full cache is worth little where that full cache is broken. `kvexp yardstick` runs it on the
items of published benchmarks (as ordinary runs, resumable), compares, and leaves a file that tables read.
"""
