"""vLLM engine."""
