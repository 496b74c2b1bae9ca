"""``--data-impl bfp`` in Megatron-LM, for releases with ``--dataloader-inter-document-masking`` (core 0.19 and later).

Megatron-LM already does what packed samples need: with that option its batches carry cu_seqlens through tensor and
pipeline parallelism to the attention kernel. So only a few functions are changed. ``options`` declares and checks
options, ``builder`` makes ``BFPGPTDataset`` when a script asks for ``GPTDataset`` and skips the evaluation of a split
without samples, and ``first_step`` checks that boundaries reach attention. ``changes`` lists the modules.
"""
