"""Byte accounting of a cache: keys and values resident on the device and offloaded, per layer and in all."""

from __future__ import annotations


class MemoryTracker:
    """Key and value bytes of all layers, now and at the peak. Python integers only: no host sync.

    bytes, peak_bytes: of all layers together; layer_bytes, layer_peak_bytes, layer_offloaded_bytes: by layer.
    """

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.reset()

    def reset(self) -> None:
        """Set all numbers to 0, the peaks too."""
        layers = self.layers
        self.layer_bytes = [0] * layers
        self.layer_peak_bytes = [0] * layers
        self.bytes = 0
        self.peak_bytes = 0
        self.layer_offloaded_bytes = [0] * layers

    def set_resident(self, layer: int, now: int, transient: int = 0) -> None:
        """Layer `layer` holds `now` bytes on the device, and held at most `transient` bytes since the last call."""
        self.bytes += now - self.layer_bytes[layer]
        self.layer_bytes[layer] = now
        top = max(now, transient)
        self.layer_peak_bytes[layer] = max(self.layer_peak_bytes[layer], top)
        self.peak_bytes = max(self.peak_bytes, self.bytes - now + top)

    def set_offloaded(self, layer: int, *, offloaded: int) -> None:
        """Layer `layer` keeps `offloaded` bytes in CPU memory beside the device.

        On a CPU these are the bytes that would be offloaded from a GPU.
        """
        self.layer_offloaded_bytes[layer] = offloaded

    @property
    def offloaded_bytes(self) -> int:
        """Bytes offloaded by all layers."""
        return sum(self.layer_offloaded_bytes)

    def scale_peak_from(self, other: MemoryTracker, samples: int, among: int) -> None:
        """Set the peaks to `samples` of the `among` equal parts of another tracker's peaks.

        For a cache of some prompts (samples) out of a batch of `among` that was prefilled together.
        """
        self.layer_peak_bytes = [peak * samples // among for peak in other.layer_peak_bytes]
        self.peak_bytes = other.peak_bytes * samples // among
