"""The quickstart's corpus and tokenizer, and the check of its runs."""
