"""Raw documents to a Megatron dataset with sequence indexes.

- jsonl: files of JSON Lines -> batches of lines -> texts
- tokenizers: texts -> token ids
- dataset: the two joined by worker processes -> PREFIX.bin/.idx
- command: the command line, and the table it closes with
"""
