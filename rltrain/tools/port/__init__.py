"""``python -m rltrain.port``: a verl launch script or saved configuration becomes a short script of ours."""
