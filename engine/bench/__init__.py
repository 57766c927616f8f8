"""Measures the engine: `forward` the model's step alone, `serve` the whole path; `record` is what a run leaves."""
