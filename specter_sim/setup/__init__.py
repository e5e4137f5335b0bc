"""From a configuration to everything a run needs."""

from specter_sim.setup.resolve import Setup, resolve
from specter_sim.setup.sources import BUNDLED_FAMILY, whole_trace
from specter_sim.setup.text import Request

__all__ = ["BUNDLED_FAMILY", "Request", "Setup", "resolve", "whole_trace"]
