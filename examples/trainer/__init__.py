"""The example trainer: GPT on megatron-core and DeepSpeed. ``training.main`` calls the others in this order:

config, arguments       the options of a run, and its command line
process, ranks          how a rank starts and ends, and what ranks do together
data, baseline          from datasets on disk to micro-batches
model, engine           the model, in DeepSpeed's engine
checkpoints/            saving, resuming, converting
evaluation              the loss of micro-batches and of whole splits
log, reports            what the run writes, and when it stops
"""
