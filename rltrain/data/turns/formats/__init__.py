"""How model families write calls of tools: one file a format, on the ground of `reading.py`."""
