"""Run a setup on the compiled engine."""

from __future__ import annotations

from specter_sim.engine.block import Block
from specter_sim.engine.flatten import array_of, block_of
from specter_sim.engine.kernel import (
    BEGAN_S,
    COMPUTED_S,
    DRAFTED_S,
    LINK_BUSY,
    NOW,
    NUM_STALLS,
    NUM_TIMES,
    START_S,
)
from specter_sim.offload.decode import StallCause
from specter_sim.policies.own import is_own
from specter_sim.results import Result
from specter_sim.setup import Setup
from specter_sim.sim.account import COUNTED, Decoded, conditions_of, summarize
from specter_sim.sim.profile import with_profiled_depth

PROMPT_PHASE, TEXT_PHASE = 0, 1
_CAUSES = (StallCause.DEMAND, StallCause.LATE, StallCause.JOIN)


def why_not(setup: Setup) -> str | None:
    """Why this setup needs the SimPy world, None when the compiled engine can run it."""
    own = [info.name for info in (setup.eviction, setup.prefetch, setup.depth) if is_own(info.name)]
    if own:
        return f"{' and '.join(own)} is plain Python of your own, which is slower"
    if setup.machine.host.pinned_share(setup.plan.host_bytes) < 1:
        return "some experts are not in pinned memory, and their bounce copies share the host"
    if setup.costs.expand_per_load_s > 0:
        return "loads are expanded when they arrive"
    return None


def simulate_compiled(setup: Setup) -> Result:
    """What ``sim.simulate`` returns, by the compiled engine.

    Raises ValueError for a setup that ``why_not`` refuses.
    """
    reason = why_not(setup)
    if reason is not None:
        raise ValueError(reason)
    if setup.depth.name == "profile":
        setup = with_profiled_depth(setup, simulate_compiled)
    return summarize_block(setup, *serve(setup))


def serve(setup: Setup, journal_entries: int = 0) -> tuple[Block, list[Decoded]]:
    """Serve every request; the block holds clock and journal afterwards."""
    from specter_sim.engine import entries  # compiles, or loads what was compiled before

    block = block_of(setup, journal_entries)
    requests = []
    for number, request in enumerate(setup.requests):
        if number > 0 and setup.config.trace.between == "cold":
            entries.drain(block.address)
            block.put_all(setup.new_state(request.begin, array_of)._asdict())
        entries.serve(block.address, number, PROMPT_PHASE)
        before, first = _counts(block), int(block.arrays["window_count"][0])
        entries.serve(block.address, number, TEXT_PHASE)
        last = int(block.arrays["window_count"][0])
        loads = entries.least_loads(block.address, first, last)
        compute_s = entries.least_compute(block.address, number, first, last)
        requests.append(_decoded(block, number, first, last, before, (loads, compute_s)))
    return block, requests


def summarize_block(setup: Setup, block: Block, requests: list[Decoded]) -> Result:
    """All metrics of a served block."""
    clock = block.arrays["clock"]
    return summarize(conditions_of(setup), requests, float(clock[NOW]), float(clock[LINK_BUSY]))


def _decoded(
    block: Block,
    number: int,
    first: int,
    last: int,
    before: dict[str, int],
    least: tuple[int, float],
) -> Decoded:
    arrays = block.arrays
    times = arrays["request_times"][number * NUM_TIMES : (number + 1) * NUM_TIMES]
    stalls = arrays["stall_s"][number * NUM_STALLS : (number + 1) * NUM_STALLS]
    windows = slice(first, last)
    counts = _counts(block)
    return Decoded(
        float(times[BEGAN_S]),
        float(times[START_S]),
        arrays["window_began_s"][windows],
        arrays["window_ended_s"][windows],
        arrays["window_depth"][windows],
        arrays["window_accepted"][windows],
        {cause: float(seconds) for cause, seconds in zip(_CAUSES, stalls, strict=True)},
        {name: counts[name] - before[name] for name in counts},
        float(times[DRAFTED_S]),
        float(times[COMPUTED_S]),
        *least,
    )


def _counts(block: Block) -> dict[str, int]:
    counters = block.arrays["counters"]
    return {name: int(counters[place]) for name, place in COUNTED.items()}
