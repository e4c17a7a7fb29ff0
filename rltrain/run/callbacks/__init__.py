"""Callbacks that observe a run."""
