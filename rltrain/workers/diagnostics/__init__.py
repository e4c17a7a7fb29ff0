"""Checks of nodes and links, profiles, incident dumps, and out-of-memory reports."""
