"""TensorBoard: event files in a folder."""

import os
from collections.abc import Sequence

from megatron_bfp.errors import InputError

from .journal import Row
from .tracker import import_for


class TensorBoard:
    """Writes event files, and forces them out after each row. TensorBoard hides steps of before that are repeated.

    Args:
        folder: of ``--tensorboard-dir``. Creates it.

    Raises:
        InputError: it cannot be written.
        OptionError: TensorBoard is not installed.
    """

    name = "TensorBoard"

    def __init__(self, folder: str) -> None:
        import_for("--tensorboard-dir", "tensorboard")
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise InputError(f"--tensorboard-dir {folder}: {error.strerror}") from None
        if not os.access(folder, os.W_OK):
            raise InputError(f"--tensorboard-dir {folder}: this user may not write there")
        self._folder = folder

    def open(self, iteration: int) -> str:
        """Begin a file that replaces the events of later steps in the files of before."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(self._folder, purge_step=iteration + 1)
        return self._folder

    def send(self, rows: Sequence[Row]) -> None:
        """Write rows."""
        for row in rows:
            for name, value in row.named().items():
                self._writer.add_scalar(name, value, row.iteration)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        """Close the file."""
        self._writer.close()
