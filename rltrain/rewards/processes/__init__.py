"""Processes that score responses: slots (rltrain/slots) inside Ray actors, or a remote server over HTTP."""
