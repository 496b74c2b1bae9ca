"""Raw documents to a Megatron dataset with sequence indexes.

- options: the command line's; run: what they ask to be done, and what would be another run
- input_files: ``--input`` -> files in order, by one rule; file_kinds: files of other kinds, which are refused
- inputs: a piece of a file -> batches of raw documents, by what its first bytes say
- compression, jsonl, parquet: what reads them; documents: what they pass on
- plan: files -> shards, the units of work
- shards: a shard -> a small dataset and a record; tokenization: a batch of documents -> token ids
- processes, ray_executor: what runs the shards; amount, meter: how far they are
- run_folder: OUT.shards, where a run that was interrupted goes on; lease: for one process at a time; replanning: when
  input files have changed meanwhile
- dataset: all of it -> PREFIX.bin/.idx; joining puts shards together, verification checks what is on disk
- parts: datasets of several jobs, before they are merged
- bad_documents, bad_places, summary: what is written beside them
- tokenizers: by Megatron's names; tokenizer_interface, and one module for each library
- fast_tokenizer: the same ids in less time; tokenizer_descriptions, tokenizer_probes: what it is made of and held to
- long_texts: documents that the libraries need much memory for
- command: what the command line does, and the tables it closes with
"""
