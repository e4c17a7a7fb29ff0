"""Metrics of a step, and alarms on them."""
