"""How nodes gather before a run, and what they tell each other."""
