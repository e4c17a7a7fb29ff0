"""Whoever watches a run."""
