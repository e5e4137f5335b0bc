"""libcachesim's speed on recorded lookups: what `specter-sim bench --peer` runs beside its own.

libcachesim is GPL: this script stands outside the packages and is run in a process of its own, as
`SCRIPT FOLDER SLOTS REPEATS`. It prints one JSON line: misses and seconds by policy.
"""

import json
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any


def main(folder: str, slots: int, repeats: int) -> None:
    """Replay every file of a folder with each policy; print misses and median CPU seconds."""
    import libcachesim

    policies = {"lru": "LRU", "fifo": "FIFO", "lfu": "LFU", "belady": "Belady"}
    measured: dict[str, Any] = {"version": version("libcachesim")}
    files = sorted(Path(folder).glob("*.oracleGeneral"))
    for name, theirs in policies.items():
        runs = [_replay(libcachesim, theirs, files, slots) for _ in range(repeats)]
        measured[name] = {
            "misses": runs[0][0],
            "seconds": statistics.median(seconds for _, seconds in runs),
        }
    print(json.dumps(measured))


def _replay(library: Any, policy: str, files: list[Path], slots: int) -> tuple[int, float]:
    misses, seconds = 0, 0.0
    for file in files:
        # The default table of 128 MiB would be slower.
        cache = getattr(library, policy)(slots, hashpower=10)
        reader = library.TraceReader(str(file), library.TraceType.ORACLE_GENERAL_TRACE)
        started = time.process_time()
        share, _ = cache.process_trace(reader)
        seconds += time.process_time() - started
        misses += round(share * reader.get_num_of_req())
    return misses, seconds


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
