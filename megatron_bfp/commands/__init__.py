"""``megatron-bfp VERB``: a module per verb, and what they share."""
