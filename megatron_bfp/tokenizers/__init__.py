"""Tokenizers whose ids are those of Megatron's own tool: Hugging Face, SentencePiece and tiktoken."""

from .registry import load_tokenizer

__all__ = ["load_tokenizer"]
