"""Checkpoint → text, and models in other formats: generation, Hugging Face export and import, lm-eval."""
