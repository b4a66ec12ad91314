"""Speed and memory, as ratios measured in one run. Nothing here is asserted in tests."""
