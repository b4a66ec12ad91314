"""Recorded runs as tables, verdicts, figures and pages."""
