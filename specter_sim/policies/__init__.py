"""Every eviction, prefetch and depth rule: small functions over one flat state."""

from specter_sim.policies.catalogue import DEPTH, EVICTION, PREFETCH, Param, PolicyInfo

__all__ = ["DEPTH", "EVICTION", "PREFETCH", "Param", "PolicyInfo"]
