"""Where scorers run: killable processes behind Ray actors, a server behind HTTP, and the jail for programs."""
