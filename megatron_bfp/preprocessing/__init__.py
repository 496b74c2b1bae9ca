"""Raw documents to a Megatron dataset with sequence indexes.

- inputs: ``--input`` -> files in order; a file -> batches of raw documents, by what its first bytes say it is
- compression, jsonl, parquet: what reads them
- documents: what the stages pass on: places, batches, records, bad documents
- tokenizers: by Megatron's names; tokenizer_interface and one module for each library
- tokenization, workers: batches -> texts -> token ids, in this process or in several
- dataset: all of it joined -> PREFIX.bin/.idx; verification checks what is on disk
- bad_documents: the list of those left out
- command: the command line, and the table it closes with
"""
