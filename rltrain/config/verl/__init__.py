"""Keys and files of verl's and of its relatives, and what they mean here. `keys` answers for a key; it comes first."""
