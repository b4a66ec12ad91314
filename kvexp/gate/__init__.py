"""`kvexp gate`: a served model against its own reference, prompt by prompt, with a verdict (docs/gate.md)."""
