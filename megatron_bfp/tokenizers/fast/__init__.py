"""gigatoken instead of a tokenizer's library: the same ids in a tenth of the time, used only if they compare equal."""
