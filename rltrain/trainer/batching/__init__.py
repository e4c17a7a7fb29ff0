"""Distribution of samples over mini-batches, ranks and micro-batches, and the columns of each pass."""
