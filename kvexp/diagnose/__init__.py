"""Why did it fail? What was evicted, what that did to attention, and which eviction changed the answer.

Options of `diagnose` (conf/diagnose, `after`) add logs to a run; `kvexp diagnose --help` lists what reads
them. Nothing is imported here, so that reading waits for no torch.
"""
