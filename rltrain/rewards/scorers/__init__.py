"""Scorers of the built-in data sources, one file each. The registry finds them by listing this folder."""
