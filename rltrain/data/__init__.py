"""Data: rows of parquet files, the order of batches, and conversations as token ids."""
