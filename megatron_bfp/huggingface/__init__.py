"""Models of the example trainer as Hugging Face LLaMA models, and the other way round.

``checkpoint`` reads the trainer's checkpoints, ``llama`` maps their parameters to those of transformers and back,
``export`` writes a folder that transformers loads, and ``pretrained`` reads one to start training from.
"""
