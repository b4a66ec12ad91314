"""Engines other than kvexp's own."""
