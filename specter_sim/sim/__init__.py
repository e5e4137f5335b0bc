"""The SimPy world: the schedule driven by a virtual clock. The reference for every other world."""

from specter_sim.sim.run import Run, World, simulate

__all__ = ["Run", "World", "simulate"]
