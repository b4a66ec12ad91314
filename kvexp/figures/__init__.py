"""Pictures of what was recorded. No torch. Each module is a command, so none is imported here."""
