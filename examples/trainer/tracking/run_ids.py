"""Which runs of trackers a save folder belongs to, so that a resumed run goes on in them."""

import json
import os
import threading

from megatron_bfp.files import read_json_object, write_whole

FILE = "trackers.json"


class RunIds:
    """Ids of runs, by tracker and names.

    Args:
        folder: of ``--save``; None: they are remembered in this process only.
    """

    def __init__(self, folder: str | None) -> None:
        self._path = os.path.join(folder, FILE) if folder else None
        self._ids: dict[str, dict[str, str]] = (read_json_object(self._path) or {}) if self._path else {}
        self._lock = threading.Lock()  # each tracker has a thread

    def get(self, tracker: str, names: str) -> str | None:
        """The id of a run; None if there is none of these names.

        Args:
            names: project, run and the like, as given by the options: others mean another run.
        """
        return self._ids.get(tracker, {}).get(names)

    def put(self, tracker: str, names: str, run_id: str) -> None:
        """Remember an id.

        Raises:
            OSError: it cannot be written.
        """
        with self._lock:
            self._ids.setdefault(tracker, {})[names] = run_id
            if self._path:
                write_whole(self._path, json.dumps(self._ids, indent=1).encode())
