"""The quickstart's corpus, and the check of its runs."""
