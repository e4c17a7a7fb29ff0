"""Checks before a run starts: settings, models, memory and nodes."""
