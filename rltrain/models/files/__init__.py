"""Checkpoint files: contents and integrity."""
