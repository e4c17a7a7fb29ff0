"""Attention over samples that are laid end to end."""
