"""The ledger: bytes that are really resident, now and at the peak, per layer and in all."""

from __future__ import annotations


class Ledger:
    """Counts key and value bytes of all layers as buffers come and go. Python integers only: no host sync."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.reset()

    def reset(self) -> None:
        """Nothing is held, and nothing ever was."""
        layers = self.layers
        self.layer_bytes = [0] * layers
        self.layer_peak_bytes = [0] * layers
        self.bytes = 0
        self.peak_bytes = 0

    def set(self, layer: int, now: int, transient: int = 0) -> None:
        """Layer `layer` holds `now` bytes; on the way there it held `transient` bytes at once."""
        self.bytes += now - self.layer_bytes[layer]
        self.layer_bytes[layer] = now
        top = max(now, transient)
        self.layer_peak_bytes[layer] = max(self.layer_peak_bytes[layer], top)
        self.peak_bytes = max(self.peak_bytes, self.bytes - now + top)
