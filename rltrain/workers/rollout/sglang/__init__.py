"""SGLang engine."""
