"""rltrain: synchronous PPO/GRPO training of language and vision-language models."""

__version__ = "0.1.0"
