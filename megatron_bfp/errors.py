"""The exceptions of this package. Every message names what is wrong, where, and what to do about it."""


class BFPError(Exception):
    """Base of all errors that a user can fix; commands print it as one line and exit with status 2."""

    on_every_rank = False
    """Whether every rank of a run raises this error, so that one rank is enough to print it."""


class OptionError(BFPError, ValueError):
    """An option or argument has a value that is not supported."""

    on_every_rank = True


class InputError(BFPError):
    """An input document, or the file that holds it, cannot be used."""


class IndexedDatasetError(BFPError):
    """A .bin/.idx pair is missing, damaged or inconsistent."""


class SequenceIndexError(BFPError):
    """A sequence index is missing, damaged, stale or meant for something else."""


class IntegrationError(BFPError):
    """The training script's Megatron is not supported, or was imported before the plugin."""


class UnsupportedMegatronError(IntegrationError):
    """As IntegrationError, raised while Megatron is imported or parses its options, which all ranks do alike."""

    on_every_rank = True
