"""The command line on the model of random weights and the sample texts, in tests that are not about the defaults."""

DEFAULTS = ("model=tiny", "task=sample")


def small(*words: str) -> list[str]:
    """The overrides, with `DEFAULTS` for what they leave open."""
    taken = {word.partition("=")[0] for word in words}
    return [word for word in DEFAULTS if word.partition("=")[0] not in taken] + list(words)
