"""Interface between driver and workers: the methods of each role, their arguments and their results."""
