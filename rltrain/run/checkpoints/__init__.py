"""Checkpoints of a run: written, found again, kept and removed."""
