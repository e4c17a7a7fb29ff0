"""A run: assembly, steps, callbacks, checkpoints and reports."""
