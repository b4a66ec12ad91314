"""The runs of one command: jobs, shared prefills, worker processes, and the summary at the end."""
