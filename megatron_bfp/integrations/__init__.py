"""How ``--data-impl bfp`` gets into training scripts that know nothing of it.

``activation`` decides whether anything is done at all, ``hooks`` changes modules right after their import, and
``megatron_lm`` and ``megatron_deepspeed`` say which modules and how. ``startup_file`` does it for unedited scripts.
"""
