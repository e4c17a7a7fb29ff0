"""Training loop and driver-side state."""

if __name__ != "rltrain.trainer":  # the folder trainer/ at the top of a checkout is a link, for readers
    raise ImportError("import rltrain.trainer: importing through the symlink would create a second copy of every class")
