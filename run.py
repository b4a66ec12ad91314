"""kvexp's command line in a checkout: `python run.py` is `kvexp run`."""

from kvexp.cli import run

if __name__ == "__main__":
    run()
