"""Why a run lost quality."""
