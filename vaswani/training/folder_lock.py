"""The lock of a run's output folder, so that two runs never write to the same one."""

import errno
import fcntl
import os
import socket
import weakref
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from transformers import TrainingArguments
from transformers.utils import logging

from .callbacks import agree

logger = logging.get_logger(__name__)

# Pushes leave out names that begin with an underscore.
LOCK_FILE = "_lock"

# What file systems without locks answer.
_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


class FolderLock:
    """Context manager that holds the lock of an output folder; it can be entered again while it is held.

    Parameters
    ----------
    args : TrainingArguments
        Its `output_dir` is locked by the process that saves. The other processes of a distributed run share the lock.

    Raises
    ------
    BlockingIOError
        On entering, on every process, if another run holds the lock. The message names its process, host and start.

    Notes
    -----
    The lock is `flock` on the file `_lock`, which the kernel releases when the process ends in any way; a file that a
    crash left behind does not block. A network file system must support locks between hosts (NFS does, with its lock
    service). Where locks are not supported there is a warning, and the folder is not protected.
    """

    def __init__(self, args: TrainingArguments) -> None:
        self.args = args
        self.folder = Path(str(args.output_dir))
        self._file: IO[str] | None = None
        self._depth = 0
        # A forked worker shares the lock: without this, one that outlives a killed run would keep it.
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close(this()))

    def __enter__(self) -> "FolderLock":
        self._depth += 1
        if self._depth == 1:
            try:
                self._acquire_on_all()
            except BaseException:
                self._depth = 0
                raise
        return self

    def __exit__(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and self._file is not None:
            (self.folder / LOCK_FILE).unlink(missing_ok=True)  # before the lock is released
            _close(self)
            if self._is_new and not any(self.folder.iterdir()):
                self.folder.rmdir()

    def _acquire_on_all(self) -> None:
        """Acquire the lock on the process that saves; if that fails, fail on every process."""
        error: OSError | None = None
        if self.args.should_save:
            try:
                self._acquire()
            except OSError as failure:
                error = failure
        if agree(error is not None, self.args):
            _close(self)
            raise error or BlockingIOError(f"The main process could not lock {self.folder}.")

    def _acquire(self) -> None:
        self._is_new = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / LOCK_FILE
        while self._file is None:
            file = path.open("a+", encoding="utf-8")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.seek(0)
                owner = file.read().strip() or "another process"
                file.close()
                if error.errno in _UNSUPPORTED:
                    logger.warning(f"{self.folder} cannot be locked ({error.strerror}): start no other run there.")
                    path.unlink(missing_ok=True)
                    return
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                raise BlockingIOError(
                    f"{self.folder} is in use by another run ({owner}): wait until it ends, or choose another "
                    "output_dir."
                ) from None
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                self._file = file
            else:  # the run that held it has just removed it
                file.close()
        started = datetime.now().astimezone().isoformat(" ", "seconds")
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}, since {started}\n")
        self._file.flush()


def _close(lock: FolderLock | None) -> None:
    if lock is not None and lock._file is not None:
        lock._file.close()
        lock._file = None


__all__ = ["LOCK_FILE", "FolderLock"]
