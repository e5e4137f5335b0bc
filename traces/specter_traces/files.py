"""Writing files so that a reader never sees half of one."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from specter_traces.errors import UsageError

Content = bytes | str | Callable[[BinaryIO], object]


_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def refuse_irregular(path: str | os.PathLike[str]) -> None:
    """Raise UsageError for a path that cannot exist, or that exists and is no regular file.

    Devices and pipes never end or never begin. A file that is missing is left to its reader.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    except (OSError, ValueError) as error:
        told = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot read {str(path)!r:.80}: {told}") from None
    if not stat.S_ISREG(mode):
        raise UsageError(f"cannot read {path}: it is {_kind(mode)}, not a regular file")


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "a device")


def write_atomic(path: str | os.PathLike[str], content: Content) -> Path:
    """Write `content` to a temporary file beside `path`, then rename it over `path`.

    `content` is bytes, text (written as UTF-8) or a function that writes to an open binary file.
    Missing parent folders are made. Raises UsageError when the folder cannot be written or `path`
    is there and no regular file; any failure leaves an existing `path` as it was and no temporary
    file behind.
    """
    target = Path(path)
    try:
        _refuse_replacing(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except (OSError, ValueError) as error:
        raise _unwritable(target, error) from error
    try:
        with os.fdopen(handle, "wb") as file:
            _write(file, content)
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes files private
        os.replace(temporary, target)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _unwritable(target, error) from error
        raise
    return target


def _refuse_replacing(target: Path) -> None:
    """A rename would put a file where a device, a pipe or a folder is."""
    try:
        mode = target.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISREG(mode):
        raise UsageError(f"cannot write {target}: it is {_kind(mode)}; give the name of a file")


def _write(file: BinaryIO, content: Content) -> None:
    if isinstance(content, bytes):
        file.write(content)
    elif isinstance(content, str):
        file.write(content.encode())
    else:
        content(file)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _unwritable(target: Path, error: OSError | ValueError) -> UsageError:
    reason = getattr(error, "strerror", None) or str(error)
    return UsageError(f"cannot write {target}: {reason}; choose a folder that can be written")
