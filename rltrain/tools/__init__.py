"""Programs around a run: they are started by a person and import whatever they need."""
