"""``python -m rltrain.serve``: a model behind a server that speaks as OpenAI's does, for programs that evaluate."""
