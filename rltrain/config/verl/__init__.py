"""Keys and files of verl's and of its relatives, and what they mean here."""
