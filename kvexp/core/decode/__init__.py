"""One decode step of full caches in as few operations as possible: what `EvictionLayer.forward` does, faster."""
