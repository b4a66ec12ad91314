"""What removing tokens from an otherwise full cache does to its answer, and which scores rank tokens by that.

`kvexp diagnose causal`; docs/causes.md says what is measured and how sure it is. Nothing is imported here.
"""
