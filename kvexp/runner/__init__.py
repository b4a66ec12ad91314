"""Configuration in, rows out: the only place where all parts meet. Nothing is imported here, so that help is quick."""
