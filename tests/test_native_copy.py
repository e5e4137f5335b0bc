"""The native copy thread: right bytes, submission order, the pace of a link, and a clean end."""

import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from specter_cuda import Completion, CopyThread
from specter_cuda.library import open_library

MIB = 1 << 20
PATIENCE_S = 20.0


class Run:
    """Random source memory, empty destination memory, and copies between them."""

    def __init__(self, size: int) -> None:
        self.source = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
        self.destination = np.zeros(size, dtype=np.uint8)

    def submit(self, thread: CopyThread, tag: int, start: int, size: int) -> None:
        thread.submit(
            tag, self.destination.ctypes.data + start, self.source.ctypes.data + start, size
        )


def finished(thread: CopyThread, number: int) -> list[Completion]:
    """The next `number` completions."""
    completions: list[Completion] = []
    until = time.monotonic() + PATIENCE_S
    while len(completions) < number:
        assert time.monotonic() < until, f"{len(completions)} of {number} copies finished"
        completions += thread.wait(1.0)
    assert len(completions) == number
    return completions


def copy_threads() -> list[str]:
    """The state of every copy thread of this process, as Linux tells it."""
    states = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread may end while it is looked at
            states.append((task / "status").read_text())
    return [state for state in states if "specter-copy" in state]


def eventually(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + PATIENCE_S
    while not holds() and time.monotonic() < until:
        time.sleep(0.001)
    return holds()


@pytest.mark.parametrize("bytes_per_s", [None, 4e9])
def test_every_byte_arrives_and_nothing_beside_it(bytes_per_s: float | None) -> None:
    sizes = [1, 7, 4096, 256 * 1024, 256 * 1024 + 1, 3 * MIB + 5, 0]
    gap = 64
    run = Run(sum(sizes) + gap * len(sizes))
    start = 0
    with CopyThread(bytes_per_s) as thread:
        for tag, size in enumerate(sizes):
            run.submit(thread, tag, start, size)
            start += size + gap
        completions = finished(thread, len(sizes))
    assert [(c.tag, c.copied_bytes) for c in completions] == list(enumerate(sizes))
    start = 0
    for size in sizes:
        copied, beside = slice(start, start + size), slice(start + size, start + size + gap)
        assert np.array_equal(run.destination[copied], run.source[copied])
        assert not run.destination[beside].any()
        start += size + gap


def test_bytes_are_in_place_when_a_copy_is_reported() -> None:
    run = Run(16 * MIB)
    with CopyThread(3e9) as thread:
        for tag in range(16):
            run.submit(thread, tag, tag * MIB, MIB)
        seen = 0
        while seen < 16:
            for completion in thread.wait(1.0):
                part = slice(completion.tag * MIB, (completion.tag + 1) * MIB)
                assert np.array_equal(run.destination[part], run.source[part])
                assert completion.ended_s <= time.monotonic()
                seen += 1


def test_copies_end_in_submission_order_whatever_their_tags_and_sizes() -> None:
    run = Run(MIB)
    tags = [2**62, -3, 7, 7, 0] * 50
    with CopyThread(1e9, latency_s=1e-5) as thread:
        for place, tag in enumerate(tags):
            run.submit(thread, tag, 0, 1 + 997 * (place % 5))
        completions = finished(thread, len(tags))
    assert [c.tag for c in completions] == tags
    ends = [c.ended_s for c in completions]
    assert ends == sorted(ends)
    began = [c.began_s for c in completions]
    assert all(start >= end for start, end in zip(began[1:], ends, strict=False))


def test_twice_the_bandwidth_takes_half_the_time() -> None:
    spent = {}
    run = Run(128 * 1024)
    for bytes_per_s in (12.5e6, 25e6):
        with CopyThread(bytes_per_s) as thread:
            for tag in range(10):
                run.submit(thread, tag, 0, run.source.size)
            completions = finished(thread, 10)
            spent[bytes_per_s] = completions[-1].ended_s - completions[0].began_s
        # One long time slice taken by other processes is allowed for.
        assert spent[bytes_per_s] == pytest.approx(10 * run.source.size / bytes_per_s, rel=0.2)
    assert spent[12.5e6] / spent[25e6] == pytest.approx(2.0, rel=0.2)


def test_no_copy_is_faster_than_the_link() -> None:
    run = Run(64 * 1024)
    with CopyThread(200e6, latency_s=2e-4) as thread:
        for tag in range(30):
            run.submit(thread, tag, 0, run.source.size)
        for completion in finished(thread, 30):
            taken_s = completion.ended_s - completion.began_s
            assert taken_s > 0.999 * run.source.size / 200e6


def test_a_queue_hides_latency() -> None:
    latency_s, copies = 5e-3, 12
    run = Run(1000)
    with CopyThread(1e9, latency_s=latency_s) as thread:
        for tag in range(copies):
            run.submit(thread, tag, 0, 1000)
        queued = finished(thread, copies)
        alone = []
        for tag in range(copies):
            run.submit(thread, tag, 0, 1000)
            alone += finished(thread, 1)
    spent_alone = alone[-1].ended_s - alone[0].began_s
    spent_queued = queued[-1].ended_s - queued[0].began_s
    assert spent_alone > 0.99 * copies * latency_s
    assert spent_alone / spent_queued > copies / 3


def test_further_pieces_cost_latency_as_far_as_the_queue_does_not_hide_it() -> None:
    size, rate, latency_s = 64 * 1024, 40e6, 10e-3
    piece_s = size / 4 / rate
    run = Run(size)
    for depth, expected_s in (
        (1, 4 * (latency_s + piece_s)),
        (4, latency_s + piece_s + 3 * (latency_s + piece_s) / 4),
        (64, latency_s + 4 * piece_s),
    ):
        with CopyThread(rate, latency_s, size // 4, depth) as thread:
            run.submit(thread, 0, 0, size)
            (completion,) = finished(thread, 1)
        assert completion.ended_s - completion.began_s == pytest.approx(expected_s, rel=0.2)


def test_waiting_ends_at_the_timeout_or_at_the_first_copy() -> None:
    run = Run(100_000)
    with CopyThread(1e4) as thread:
        asked = time.monotonic()
        assert thread.wait(30.0) == []  # nothing outstanding
        assert time.monotonic() - asked < 5.0
        run.submit(thread, 1, 0, 200)
        run.submit(thread, 2, 0, 100_000)
        assert [c.tag for c in thread.wait(30.0)] == [1]
        assert thread.poll() == []
        asked = time.monotonic()
        assert thread.wait(0.02) == []
        assert 0.02 <= time.monotonic() - asked < 5.0
        assert thread.outstanding == 1


def test_other_python_threads_run_while_one_waits() -> None:
    run = Run(100_000)
    turns = 0
    with CopyThread(1e6) as thread:
        run.submit(thread, 0, 0, 100_000)
        waiter = threading.Thread(target=thread.wait, args=(30.0,))
        waiter.start()
        while waiter.is_alive():
            turns += 1
        waiter.join()
    assert turns > 100


def test_closing_drops_what_has_not_finished_and_frees_the_thread() -> None:
    before = len(copy_threads())
    run = Run(MIB)
    thread = CopyThread(1e3)  # a copy takes 17 minutes
    for tag in range(100):
        run.submit(thread, tag, 0, MIB)
    asked = time.monotonic()
    thread.close()
    thread.close()
    assert time.monotonic() - asked < 5.0
    assert eventually(lambda: len(copy_threads()) <= before)
    run.destination[:] = 0
    assert thread.poll() == []
    assert thread.wait(30.0) == []
    assert not run.destination.any()
    with pytest.raises(ValueError, match="closed"):
        run.submit(thread, 0, 0, 1)


def test_signals_are_left_to_the_interpreter() -> None:
    with CopyThread(None):
        assert eventually(lambda: bool(copy_threads()))
        blocked = next(line for line in copy_threads()[0].splitlines() if "SigBlk" in line)
    interrupt = 1 << (signal.SIGINT - 1)
    assert int(blocked.split()[1], 16) & interrupt
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_closing_wakes_a_waiting_thread() -> None:
    run = Run(MIB)
    thread = CopyThread(1e3)
    run.submit(thread, 0, 0, MIB)
    waiter = threading.Thread(target=thread.wait, args=(PATIENCE_S,))
    waiter.start()
    time.sleep(0.02)
    asked = time.monotonic()
    thread.close()
    waiter.join()
    assert time.monotonic() - asked < 5.0


def test_forgotten_threads_end_with_copies_in_flight() -> None:
    before = len(copy_threads())
    run = Run(MIB)
    for _ in range(50):
        thread = CopyThread(1e3)
        run.submit(thread, 0, 0, MIB)
        del thread
        gc.collect()
    assert eventually(lambda: len(copy_threads()) <= before)


def test_the_process_ends_while_copies_are_in_flight_also_after_a_fork() -> None:
    program = """
import os
import numpy as np
from specter_cuda import CopyThread
source, destination = np.ones(1 << 22, np.uint8), np.ones(1 << 22, np.uint8)
threads = [CopyThread(None), CopyThread(1e3)]
for thread in threads:
    for tag in range(2000):
        thread.submit(tag, destination.ctypes.data, source.ctypes.data, source.size)
if (child := os.fork()) == 0:
    try:
        threads[0].submit(0, destination.ctypes.data, source.ctypes.data, 1)
    except ValueError:
        print("closed", threads[0].poll(), threads[1].wait(60.0), flush=True)
    threads[0].close()
else:
    os.waitpid(child, 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S * 2
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed [] []\n", "")


@pytest.mark.parametrize(
    ("pace", "named"),
    [
        ((0.0, 0.0, None, 1), "bytes_per_s"),
        ((float("nan"), 0.0, None, 1), "bytes_per_s"),
        ((1.0, -1.0, None, 1), "latency_s"),
        ((1.0, 0.0, 0, 1), "granularity_bytes"),
        ((1.0, 0.0, 1, 0), "queue_depth"),
    ],
)
def test_a_pace_without_sense_is_refused(
    pace: tuple[float, float, int | None, int], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        CopyThread(*pace)


def test_addresses_and_sizes_are_checked() -> None:
    with CopyThread(None) as thread:
        for destination, source, size in ((0, 64, 1), (64, 0, 1), (64, 64, -1)):
            with pytest.raises(ValueError, match="cannot copy"):
                thread.submit(0, destination, source, size)


def test_a_missing_library_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"not built.*pip install"):
        open_library(tmp_path / "specter_native.so")
