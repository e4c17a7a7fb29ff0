"""``python -m rltrain.port``: converts a verl launch script or saved configuration to a short rltrain script."""
