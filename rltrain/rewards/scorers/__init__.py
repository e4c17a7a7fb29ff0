"""Scorers of the data sources that rltrain knows, one file each. The registry finds them by listing this folder."""
