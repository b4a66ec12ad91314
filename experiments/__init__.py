"""The papers' figures and tables made again, a folder per paper, and the commands that make, list and check them."""

from kvexp.run.threads import import_torch

import_torch()
