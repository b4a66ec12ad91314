"""One file per section of the page."""
