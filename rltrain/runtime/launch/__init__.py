"""Rendezvous of the nodes before a run, and their communication."""
