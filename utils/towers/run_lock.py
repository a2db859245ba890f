"""One training at a time in a folder: a lock that its process holds, and that dies with it."""

import errno
import fcntl
import os
import socket

from absl import logging

LOCK_FILE = ".lock"  # in the folder; it stays there, and means nothing unless a process holds it

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class FolderInUseError(ValueError):
    """Another process trains in the folder; `str()` of the error says which one."""


class FolderLock:
    """Holds a folder until `release`, or until the process ends, however it ends.

    The lock belongs to the process and not to the children that it forks. On a file system without
    locks a warning is logged and nothing is held.

    Args:
        folder: existing, writable folder.

    Raises:
        FolderInUseError: another process holds it.
        OSError: the file cannot be made.
    """

    def __init__(self, folder):
        self._path = os.path.join(folder, LOCK_FILE)
        self._descriptor = None
        while self._descriptor is None:
            self._descriptor = self._acquire()

    def is_in(self, folder):
        """Whether the file that is held lies in this folder, which may have been renamed."""
        try:
            there = os.stat(os.path.join(folder, LOCK_FILE))
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._descriptor))

    def release(self):
        """Lets another process have the folder."""
        os.close(self._descriptor)

    def _acquire(self):
        """Descriptor of the locked file, or None if the file was moved away meanwhile."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                logging.warning("%s cannot be locked (%s)", self._path, error.strerror)
                return descriptor
            holder = os.read(descriptor, 1000).decode(errors="replace").strip()
            os.close(descriptor)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            raise FolderInUseError(holder or "a process that has just started") from error
        try:
            current = os.path.samestat(os.stat(self._path), os.fstat(descriptor))
        except FileNotFoundError:
            current = False
        if not current:
            os.close(descriptor)
            return None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        return descriptor
