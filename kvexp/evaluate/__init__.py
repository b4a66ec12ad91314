"""One run: prompts, answers, scores and rows for the examples that have none yet."""
