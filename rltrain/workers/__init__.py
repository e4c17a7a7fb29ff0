"""Code of the worker processes."""

if __name__ != "rltrain.workers":  # workers/ at the top of a checkout is a symlink for readers
    raise ImportError("import rltrain.workers: importing through the symlink would create a second copy of every class")
