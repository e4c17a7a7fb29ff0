"""Runs beside each other: curves, differences, settings, phases and weights."""
