"""The model family: shapes, checkpoints, layers and the full-sequence reference. Imports torch."""
