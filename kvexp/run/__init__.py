"""From a command line to recorded runs."""
