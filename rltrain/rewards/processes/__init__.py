"""Where answers are scored: in slots (rltrain/slots) behind Ray actors, or by a server behind HTTP."""
