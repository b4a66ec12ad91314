"""Make the pages that are named, or all."""

import argparse

from experiments import pages
from kvexp.util.output import watch_pipes

watch_pipes()
parser = argparse.ArgumentParser(prog="python -m experiments.pages", description=pages.__doc__, allow_abbrev=False)
parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *pages.named()])
for name in parser.parse_args().names or pages.named():
    pages.make(name)
    print(f"wrote docs/{name}.svg and the table of {pages.path_of(name).relative_to(pages.ROOT)}")
