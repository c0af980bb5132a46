"""Where a process writes files before it publishes them, so that nothing unfinished is ever visible.

Each open store owns a folder below `<root>/.tmp`, held by a lock that the kernel drops when the
process ends, however it ends. So a folder whose lock is free is rubbish, whatever its age and
whatever machine or container its process ran in.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from contextlib import suppress
from itertools import count
from pathlib import Path


class Workspace:
    """A private folder on the store's own file system; publication is one atomic rename out of it."""

    def __init__(self, root: Path) -> None:
        self._base = root / ".tmp"
        self._base.mkdir(parents=True, exist_ok=True)
        self.sweep()
        self._lock, self._folder = self._claim()
        self._names = count()

    def new_path(self) -> str:
        """A path that no other thread or process uses."""
        return f"{self._folder}/{next(self._names)}"

    def sweep(self) -> None:
        """Remove what ended processes left behind; a few microseconds when there is nothing."""
        with suppress(FileNotFoundError):
            for name in os.listdir(self._base):
                if name.endswith(".lock"):
                    self._remove_if_free(self._base / name)

    def close(self) -> None:
        """Give the folder back. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            with suppress(OSError):
                os.unlink(f"{self._folder}.lock")
            os.close(self._lock)
            self._lock = -1

    def _claim(self) -> tuple[int, Path]:
        while True:
            folder = self._base / secrets.token_hex(8)
            lock = os.open(f"{folder}.lock", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            # Between create and lock another process's sweep may have taken the file: then start again.
            if _try_lock(lock) and os.fstat(lock).st_nlink:
                folder.mkdir()
                return lock, folder
            os.close(lock)

    def _remove_if_free(self, path: Path) -> None:
        try:
            lock = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return
        try:
            if _try_lock(lock):
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                path.unlink(missing_ok=True)
        finally:
            os.close(lock)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
