"""Files of checkpoints: what is in them and whether it is whole."""
