"""What is foretold of a run before it starts: its settings, models, memory and nodes."""
