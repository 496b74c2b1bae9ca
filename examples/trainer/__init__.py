"""The example trainer: GPT on megatron-core and DeepSpeed.

    config, arguments       the options of a run, and its command line
    process, lifeline       how a rank starts and ends, and how ranks end together
    ranks                   what ranks do together
    data, baseline          from datasets on disk to micro-batches
    model, engine           the model, in DeepSpeed's engine
    checkpoints/            saving, resuming, converting
    evaluation              the loss of micro-batches and of whole splits
    log, reports            what the run writes, and when it stops

``training.main`` puts them together.
"""
