"""`--dry-run`: what a command would do, how much of it is done, and what the rest takes."""
