"""Input files to documents: which files, what they are, JSON Lines and Parquet, compressed or not."""
