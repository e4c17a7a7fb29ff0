"""Output of a run: terminal, run folder and trackers."""
