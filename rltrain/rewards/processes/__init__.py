"""Processes that score responses: slots (rltrain/runtime/slots) inside Ray actors, or a remote server over HTTP."""
