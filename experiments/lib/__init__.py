"""What the exhibits share: data, intervals, drawings, measurements, and how they are made."""
