"""Judge models: prompts, parsing of replies, and the client of the server. Imports neither slots nor Ray."""
