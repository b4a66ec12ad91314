"""Compare kvexp with numbers recorded from the authors' own code: `kvexp check-reference FILE.npz ...`

A file is recognised by its fields and its `config` (a JSON string). What was recorded from which release, and every
field, is in the README's section "Reference numbers". Each field is printed as pass or fail; index sets must be equal,
scores, logits and outputs within 1e-4 (1e-5 where a file holds bare attention, equal where that is in half precision).
"""
