"""Keys and config files of verl and its relatives, and their meaning here. Start with `keys`, which judges a key."""
