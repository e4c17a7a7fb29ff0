"""Command-line programs around a run. They may import any other room."""
