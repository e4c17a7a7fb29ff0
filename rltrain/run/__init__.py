"""The life of a run: assembly, steps, callbacks, checkpoints and reports."""
