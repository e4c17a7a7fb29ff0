"""Data: rows of files, batch order, and conversations as token ids."""
