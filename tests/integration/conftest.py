"""Fixtures of the tests against real checkouts."""

from helpers.real_megatron.bridge import bridge
from helpers.real_megatron.deepspeed import megatron_deepspeed, megatron_deepspeed_corpus
from helpers.real_megatron.lm import megatron_lm, plugin_enabled

__all__ = ["bridge", "megatron_deepspeed", "megatron_deepspeed_corpus", "megatron_lm", "plugin_enabled"]
