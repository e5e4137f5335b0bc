"""How fast a disk gives up a file that the system does not already hold in memory."""

from __future__ import annotations

import os
import time
from pathlib import Path

SAMPLE_BYTES = 128 << 20
"""How much of a file is read: long enough to tell, short enough to wait for."""

_CHUNK_BYTES = 4 << 20


def disk_bytes_per_s(path: Path) -> float | None:
    """Rate of reading the front of `path` after the system was asked to forget it.

    None where the system cannot be asked. A file system in memory forgets nothing, and a disk's
    own cache is not emptied: the rate is then what a second start of the program would see.
    """
    advise = getattr(os, "posix_fadvise", None)  # absent on macOS and Windows
    if advise is None:
        return None
    with path.open("rb", buffering=0) as file:
        advise(file.fileno(), 0, SAMPLE_BYTES, os.POSIX_FADV_DONTNEED)
        chunk = memoryview(bytearray(_CHUNK_BYTES))
        began_s, done = time.perf_counter(), 0
        while done < SAMPLE_BYTES and (got := file.readinto(chunk)):
            done += got
        return done / max(time.perf_counter() - began_s, 1e-9)
