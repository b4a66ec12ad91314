"""Eviction methods that are not kvexp's own: a class in a user's module or file, a notebook's cell, or a package.

Nothing here decides whether code may run: callers hand over what a person has typed or written in Python.
"""

from kvexp.user_methods.admitted import AdmittedMethod, admit, admitted, source_of
from kvexp.user_methods.installed import installed_methods
from kvexp.user_methods.reference import load_method

__all__ = ["AdmittedMethod", "admit", "admitted", "installed_methods", "load_method", "source_of"]
