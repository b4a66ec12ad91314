"""The two ways kvexp says no: before anything ran, and before a number could become wrong."""


class ConfigError(ValueError):
    """A setting that cannot work. The message says what was found, what is allowed and what to change."""


class CacheError(RuntimeError):
    """A use of a cache that would give a wrong number, refused instead."""


class NotFinite(CacheError):
    """The model put out NaN or inf: every number after it would be chosen by nothing."""
