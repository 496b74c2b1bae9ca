"""The example trainer: GPT on megatron-core and DeepSpeed.

    config, config_file,    the options of a run, in a file
    arguments               and on the command line
    process, lifeline       how a rank starts and ends, and how ranks end together
    ranks                   what ranks do together
    data, baseline          from datasets on disk to micro-batches
    model, engine           the model, in DeepSpeed's engine
    checkpoints/            saving, resuming, converting
    evaluation              the loss of micro-batches and of whole splits
    log, reports            what the run writes, and when it stops
    profile                 where the time of some steps goes

``training.main`` puts them together.
"""
