"""Columns of samples: names, batches, and ragged columns."""
