"""Which run of a tracker a save folder belongs to, so that a resumed run goes on in it."""

import json
import os
import threading
from typing import Any

from megatron_bfp.files import read_json_object, write_whole

FILE = "trackers.json"


class RunIds:
    """The ids in a save folder, by tracker.

    Args:
        folder: of ``--save``; None: nothing is remembered, and each start is a run of its own.
    """

    def __init__(self, folder: str | None) -> None:
        self._path = os.path.join(folder, FILE) if folder else None
        self._lock = threading.Lock()  # each tracker has a thread

    def get(self, tracker: str, names: str) -> str | None:
        """The id of a run; None if there is none of these names.

        Args:
            names: project, run and the like, as given by the options: others mean another run.
        """
        known = self._read().get(tracker)
        return known["id"] if known and known["names"] == names else None

    def put(self, tracker: str, names: str, run_id: str) -> None:
        """Remember an id.

        Raises:
            OSError: it cannot be written.
        """
        if self._path:
            with self._lock:
                content = self._read() | {tracker: {"names": names, "id": run_id}}
                write_whole(self._path, json.dumps(content, indent=1).encode())

    def _read(self) -> dict[str, Any]:
        return (read_json_object(self._path) or {}) if self._path else {}
