"""Raw documents to a Megatron dataset.

A *job* is one call of preprocess, a *part* its share of the input with ``--shard-index``, a *task* is 8 to 256 MB of
input that one process does at once. ``write.write_datasets`` is the way through: plan, skip finished tasks, execute,
join, verify, publish.

- job: what is to be done, and what tells jobs apart; also parts that are to be merged
- plan: files to tasks; replanning: which tasks are kept if input files have changed
- job_folder: OUT.shards, from which a job resumes
- task: a task to a small dataset and a record; tokenization: a batch of documents to token ids
- joiner: finished tasks to the dataset
- bad_documents, summary: the files beside the dataset; progress: what is shown meanwhile
- readers: ``--input`` to files, files to batches of raw documents
- executors: processes of this machine, or Ray
"""
