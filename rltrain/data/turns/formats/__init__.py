"""How model families write calls of tools: `families` declares the marks and notations, and `scan` parses them."""
