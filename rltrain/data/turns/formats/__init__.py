"""Formats of tool calls: `families` declares the marks and notations of model families, and `scan` parses them."""
