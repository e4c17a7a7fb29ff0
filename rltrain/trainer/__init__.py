"""Training loop and driver-side state."""

if __name__ != "rltrain.trainer":  # trainer/ at the top of a checkout is a symlink for readers
    raise ImportError("import rltrain.trainer: importing through the symlink would create a second copy of every class")
