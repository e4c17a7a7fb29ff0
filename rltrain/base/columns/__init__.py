"""Samples as columns: their names, batches of them, and ragged ones."""
