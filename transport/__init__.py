"""Bytes between processes: control frames over streams, bulk blocks over a fabric. Knows nothing of the engine."""
