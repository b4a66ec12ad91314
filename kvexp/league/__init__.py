"""A league table of eviction methods whose entries can be measured again: docs/league.md. Nothing is imported here."""
