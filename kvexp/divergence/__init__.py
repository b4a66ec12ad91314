"""How far runs are from the full cache in KL divergence along a fixed text: measured beside their rows, then judged."""
