"""The verbs of Hugging Face models."""
