"""``--data-impl bfp`` for training scripts that know nothing of it.

``activation`` decides whether anything is changed at all, ``hooks`` changes modules right after their import, and
``megatron_lm.changes`` and ``megatron_deepspeed.changes`` list which modules and how. ``startup_file`` does it for
unedited scripts.
"""
