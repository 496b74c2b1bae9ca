"""What reaches the disk, in which order: a watcher of the calls that force, name and remove files in this process.

    with watched_disk() as disk:
        build(...)
    assert disk.unforced == []            # what got its name before its bytes were on disk
    assert disk.names_not_forced() == []  # folders that may forget a new name
    disk.events                           # ("force" | "name" | "remove", path), in order

A file counts as forced if ``fsync`` or ``fdatasync`` saw it with the size and time of modification that it has when it
is named; a folder, if each file in it and the folder itself was.
"""

import os
from contextlib import contextmanager
from unittest import mock

NAMING = ("rename", "replace", "link")
REMOVING = ("remove", "unlink", "rmdir")
FORCING = ("fsync", "fdatasync")


class Disk:
    """Events of a block of code, and what was wrong with their order."""

    def __init__(self):
        self.events = []
        self.unforced = []
        """Paths that were named before they were on disk, as (path that was not forced, the new name)."""
        self._forced = {}
        self._named_in = {}

    def forced(self, descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        status = os.fstat(descriptor)
        self._forced[status.st_dev, status.st_ino] = (status.st_size, status.st_mtime_ns)
        self._named_in.pop(path, None)
        self.events.append(("force", path))

    def named(self, source, target):
        for path in _with_contents(source):
            if not self.is_forced(path):
                self.unforced.append((str(path), str(target)))
        self.events.append(("name", os.path.abspath(target)))

    def was_named(self, target):
        self._named_in[os.path.dirname(os.path.abspath(target))] = os.path.abspath(target)

    def removed(self, path, folder):
        if folder is None:  # within shutil.rmtree, of what another call names
            self.events.append(("remove", os.path.abspath(path)))

    def is_forced(self, path):
        """Whether a file or folder is on disk as it is now."""
        status = os.lstat(path)
        return self._forced.get((status.st_dev, status.st_ino)) == (status.st_size, status.st_mtime_ns)

    def names_not_forced(self):
        """The last name in each folder that was not forced since, if it is still there."""
        return [name for name in self._named_in.values() if os.path.lexists(name)]

    def index(self, event, ending):
        """The index of the first event of a kind whose path ends so."""
        return next(i for i, (kind, path) in enumerate(self.events) if kind == event and path.endswith(ending))


def _with_contents(path):
    yield os.path.abspath(path)
    for folder, folders, files in os.walk(path):
        for name in folders + files:
            yield os.path.join(folder, name)


@contextmanager
def watched_disk():
    """Watch the calls of ``os`` in this process, all threads of it."""
    disk = Disk()

    def forcing(call):
        def force(descriptor):
            call(descriptor)
            disk.forced(descriptor if isinstance(descriptor, int) else descriptor.fileno())

        return force

    def naming(call):
        def name(source, target, **keywords):
            disk.named(source, target)
            call(source, target, **keywords)
            disk.was_named(target)

        return name

    def removing(call):
        def remove(path, *, dir_fd=None):
            disk.removed(path, dir_fd)
            call(path, dir_fd=dir_fd)

        return remove

    with mock.patch.multiple(
        os,
        **{name: forcing(getattr(os, name)) for name in FORCING},
        **{name: naming(getattr(os, name)) for name in NAMING},
        **{name: removing(getattr(os, name)) for name in REMOVING},
    ):
        yield disk
