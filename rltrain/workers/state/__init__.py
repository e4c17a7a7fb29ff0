"""State of the models of a worker: offloading, saving, and weight sync."""
