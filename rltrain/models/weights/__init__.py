"""Weights: their names, where each comes from, how they are sharded, checked and exported."""
