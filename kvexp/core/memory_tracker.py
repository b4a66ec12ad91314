"""The ledger: bytes that are resident, now and at the peak, and offloaded, per layer and in all."""

from __future__ import annotations


class MemoryTracker:
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
        self.layer_offloaded_bytes = [0] * layers

    def set(self, layer: int, now: int, transient: int = 0) -> None:
        """Layer `layer` holds `now` bytes; on the way there it held `transient` bytes at once."""
        self.bytes += now - self.layer_bytes[layer]
        self.layer_bytes[layer] = now
        top = max(now, transient)
        self.layer_peak_bytes[layer] = max(self.layer_peak_bytes[layer], top)
        self.peak_bytes = max(self.peak_bytes, self.bytes - now + top)

    def note(self, layer: int, *, offloaded: int) -> None:
        """Layer `layer` keeps so many bytes off the device; on a CPU, these are the bytes that would be."""
        self.layer_offloaded_bytes[layer] = offloaded

    @property
    def offloaded_bytes(self) -> int:
        return sum(self.layer_offloaded_bytes)

    def peak_of(self, other: MemoryTracker, samples: int, among: int) -> None:
        """Take over the peaks of another ledger of `among` samples, as the share of `samples`."""
        self.layer_peak_bytes = [peak * samples // among for peak in other.layer_peak_bytes]
        self.peak_bytes = other.peak_bytes * samples // among
