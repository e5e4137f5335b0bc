"""Which engine computes, on this machine.

The compiled engine, unless its machine code is not there yet and the SimPy engine would be done
before it were compiled: then the SimPy engine, which gives the same results.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

from specter_sim.config import RunConfig, resolved
from specter_sim.engine.ready import COMPILE_S, is_ready, make_ready
from specter_sim.hardware import find_model
from specter_sim.results import Engine
from specter_sim.sweep.evaluate import evaluate, evaluate_compiled
from specter_sim.sweep.executor import Compute
from specter_sim.sweep.plan import Task
from specter_sim.sweep.pools import Records, in_processes, in_threads
from specter_traces.errors import SpecterError

SIMPY_TOKEN_LAYERS_PER_S = 5_000.0  # on one slow core, every layer with its own slots
SIMPY_POOL = 400.0  # experts of a model at which one pool doubles the time
COMPILING = f"compiling the engine once, about {COMPILE_S:.0f} s"

Tell = Callable[[str], None]


def engine_for(configs: Iterable[RunConfig], asked: Engine | None = None) -> Engine:
    """The engine that answers first, unless one is asked for."""
    if asked is not None:
        return asked
    if is_ready() or sum(map(simpy_seconds, configs)) > COMPILE_S:
        return Engine.COMPILED
    return Engine.SIMPY


def evaluate_once(config: RunConfig, asked: Engine | None = None) -> dict[str, Any]:
    """The result of one configuration by the engine that answers first. Raises SpecterError."""
    engine = engine_for([config], asked)
    if engine is Engine.COMPILED:
        make_ready()
    return evaluate(resolved(config), engine)


def simpy_seconds(config: RunConfig) -> float:
    """About how long the SimPy engine takes for a configuration.

    One pool for all layers is searched slot by slot at every load, and whole layers that stream
    are many loads.
    """
    try:
        shape = find_model(config.model)
    except SpecterError:
        return 0.0  # cannot run at all
    seconds = config.trace.tokens * shape.moe_layers / SIMPY_TOKEN_LAYERS_PER_S
    if config.memory.layout == "global":
        seconds *= 1 + shape.experts / SIMPY_POOL
    if config.policy.prefetch == "stream":
        seconds *= shape.num_experts / shape.top_k
    return seconds


def local(workers: int, asked: Engine | None = None, tell: Tell = lambda text: None) -> Compute:
    """Compute on this machine, with so many workers; `tell` hears when the engine is compiled."""

    def compute(tasks: Iterator[Task]) -> Records:
        engine, every = _chosen(tasks, workers, asked)
        processes = in_processes(partial(evaluate, engine=engine), workers)
        if engine is Engine.SIMPY:
            yield from processes(every)
            return
        first = next(every, None)
        if first is None:
            return
        if not is_ready():
            tell(COMPILING)
        make_ready()
        yield from in_threads(evaluate_compiled, workers, processes)(chain([first], every))

    return compute


def _chosen(
    tasks: Iterator[Task], workers: int, asked: Engine | None
) -> tuple[Engine, Iterator[Task]]:
    """The engine, from no more tasks than it takes to decide; and all of the tasks."""
    seen: list[Task] = []
    if asked is not None or is_ready():
        return asked or Engine.COMPILED, tasks
    left_s = COMPILE_S * workers
    for task in tasks:
        seen.append(task)
        left_s -= simpy_seconds(task.config)
        if left_s < 0:
            return Engine.COMPILED, chain(seen, tasks)
    return Engine.SIMPY, iter(seen)
