"""Weights: names, origin, sharding, checks and export."""
