"""Writing files so that a reader never sees half of one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from specter_traces.errors import UsageError

Content = bytes | str | Callable[[BinaryIO], object]


def write_atomic(path: str | os.PathLike[str], content: Content) -> Path:
    """Write `content` to a temporary file beside `path`, then rename it over `path`.

    `content` is bytes, text (written as UTF-8) or a function that writes to an open binary file.
    Missing parent folders are made. Raises UsageError when the folder cannot be written; any
    failure leaves an existing `path` as it was and no temporary file behind.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
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


def _unwritable(target: Path, error: OSError) -> UsageError:
    reason = error.strerror or str(error)
    return UsageError(f"cannot write {target}: {reason}; choose a folder that can be written")
