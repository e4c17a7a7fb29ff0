"""Command-line programs around a run. They may import any other package of rltrain."""
