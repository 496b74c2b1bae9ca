"""Best-fit packed pre-training in Megatron-Bridge. A recipe needs one line more::

    cfg.dataset = BFPDatasetProvider.of(cfg.dataset)

Megatron-Bridge can already carry document boundaries to attention: its fine-tuning does so with batches whose rows are
joined. So a packed dataset needs a collate function that makes such batches, and the recipe's configuration needs one
that Megatron-Bridge asks for its datasets. ``provider`` has the latter, ``batches`` the former, ``options`` refuses
what does not go with them, and ``changes`` adds checks to three functions of Megatron-Bridge.

Importing this folder imports Megatron-Bridge, 0.6.2 or later. Nothing else in this package does.
"""

try:
    import megatron.bridge  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{__name__} needs Megatron-Bridge 0.6.2 or later, whose import says: {error}. Install it as its README says, "
        "or use NVIDIA's container; see docs/megatron-bridge.md",
        name=error.name,
    ) from error

from . import changes
from .provider import BFPDatasetProvider

__all__ = ["BFPDatasetProvider"]

changes.make()
