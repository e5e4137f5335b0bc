"""What a cluster's worker does: one configuration, asked and answered as JSON text.

A worker refuses what would give another answer than this machine: another version of specter, or
files (trace, model, machine, own policies) with other contents under the same names.
"""

import json
import platform
from typing import Any

from specter_sim import __version__
from specter_sim.config import build
from specter_sim.engine.ready import make_ready
from specter_sim.results import Engine
from specter_sim.sweep.evaluate import evaluate, inputs_of
from specter_traces.errors import SpecterError


def compute(asked: str) -> str:
    """Answer `{"version", "inputs", "engine", "config"}` by `{"result"}`, `{"error"}` (the
    configuration cannot run) or `{"refused"}` (this worker cannot run it).
    """
    order: dict[str, Any] = json.loads(asked)
    refused = _refusal(order)
    if refused is not None:
        return json.dumps({"refused": f"worker {platform.node()} {refused}"})
    engine = Engine(order["engine"])
    if engine is Engine.COMPILED:
        make_ready()
    try:
        return json.dumps({"result": evaluate(order["config"], engine)})
    except SpecterError as error:
        return json.dumps({"error": str(error)})


def _refusal(order: dict[str, Any]) -> str | None:
    if order["version"] != __version__:
        return f"runs specter {__version__}, and this is {order['version']}: install the same there"
    try:
        inputs = inputs_of(build(order["config"]))
    except SpecterError as error:
        return f"cannot read what this machine can: {error}"
    if inputs != order["inputs"]:
        named = order["config"]
        return (
            f"has other contents in the files of trace {named['trace']['path']!r}, model "
            f"{named['model']!r}, machine {named['machine']['name']!r} or the own policies: copy "
            "them there under the same path"
        )
    return None
