"""The package's description: README.md without what works in the repository alone. All else is in pyproject.toml.

A package index shows no relative link, which becomes its words, and no relative picture, which goes with its caption.
"""

import re
from pathlib import Path

from setuptools import setup

readme = (Path(__file__).parent / "README.md").read_text("utf-8")
words = re.sub(r"!\[[^]]*\]\((?!https:)[^)]*\)\n\n\*[^*]*\*", "", readme)
words = re.sub(r"\[([^]]*)\]\((?!https:)[^)]*\)", r"\1", words)
setup(long_description=words, long_description_content_type="text/markdown")
