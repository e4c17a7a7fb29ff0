"""Checkpoints of a run: write, find, keep and remove them."""
