"""Files of a sandbox's folder, for its owner. No path leaves the folder, no link is followed, nothing is waited for.

Guests do not run meanwhile, but have made the folder what it is: links, pipes, folders where a file is wanted.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def parts(path: str) -> list[str]:
    """The names of a relative path. Raises ValueError for any other."""
    names = [name for name in path.split("/") if name not in ("", ".")]
    if not names or path.startswith("/") or ".." in names or "\0" in path or path.endswith("/"):
        raise ValueError(f"{path!r} is no path of a file inside the sandbox's folder")
    return names


class Folder:
    """One sandbox's."""

    def __init__(self, path: str, owner: tuple[int, int] | None) -> None:
        """Before guests run: later the path may lead elsewhere. `owner`: uid and gid that new files get."""
        self.descriptor = os.open(path, _FOLDER)
        self._owner = owner

    def write(self, path: str, data: bytes) -> None:
        """Make or replace a file. Raises ValueError for links, OSError."""
        with self._parent(path, make=True) as (folder, name):
            with suppress(FileNotFoundError):
                if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                    raise _through_a_link(path)
                os.unlink(name, dir_fd=folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(name, flags, 0o644, dir_fd=folder)
            try:
                self._give(descriptor)
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
            finally:
                os.close(descriptor)

    def read(self, path: str, most: int) -> bytes:
        """A file of so many bytes at most. Raises ValueError for links, for what is no file or too large; OSError."""
        with self._parent(path, make=False) as (folder, name):
            if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                raise _through_a_link(path)
            # without O_NONBLOCK a pipe would be waited for
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(name, flags, dir_fd=folder)
            try:
                found = os.fstat(descriptor)
                if stat.S_ISDIR(found.st_mode):
                    raise IsADirectoryError(errno.EISDIR, f"{path!r} is a folder")
                if not stat.S_ISREG(found.st_mode):
                    raise ValueError(f"{path!r} is no file")
                if found.st_size > most:
                    raise ValueError(f"{path!r} has {found.st_size} bytes, more than {most}")
                with open(descriptor, "rb", closefd=False) as file:
                    return file.read(most)
            finally:
                os.close(descriptor)

    @contextmanager
    def _parent(self, path: str, *, make: bool) -> Iterator[tuple[int, str]]:
        """The folder that holds the last name of a path, opened, and that name."""
        *folders, name = parts(path)
        here = os.dup(self.descriptor)
        try:
            for folder in folders:
                below = self._open(here, folder, path, make)
                os.close(here)
                here = below
            yield here, name
        finally:
            os.close(here)

    def _open(self, here: int, name: str, path: str, make: bool) -> int:
        made = False
        if make:
            with suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=here)
                made = True
        if stat.S_ISLNK(os.stat(name, dir_fd=here, follow_symlinks=False).st_mode):
            raise _through_a_link(path)
        below = os.open(name, _FOLDER, dir_fd=here)
        if made:
            self._give(below)
        return below

    def _give(self, descriptor: int) -> None:
        if self._owner:
            os.fchown(descriptor, *self._owner)


def _through_a_link(path: str) -> ValueError:
    return ValueError(f"{path!r} goes through a link")
