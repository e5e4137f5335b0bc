"""Models, machines, and what decoding costs on them in bytes and seconds."""

from specter_sim.hardware.costs import Costs, Roofline, build_costs
from specter_sim.hardware.forms import ExpertBytes, ExpertForm, expert_bytes
from specter_sim.hardware.machines import Gpu, Host, Link, Machine, find_machine, machines
from specter_sim.hardware.memory import (
    MemoryPlan,
    SlotLayout,
    host_note,
    plan_for_budget,
    plan_for_slots,
)
from specter_sim.hardware.models import (
    ModelShape,
    Published,
    StoredFormat,
    find_model,
    models,
    published,
    shape_from_config,
)

__all__ = [
    "Costs",
    "ExpertBytes",
    "ExpertForm",
    "Gpu",
    "Host",
    "Link",
    "Machine",
    "MemoryPlan",
    "ModelShape",
    "Published",
    "Roofline",
    "SlotLayout",
    "StoredFormat",
    "build_costs",
    "expert_bytes",
    "find_machine",
    "find_model",
    "host_note",
    "machines",
    "models",
    "plan_for_budget",
    "plan_for_slots",
    "published",
    "shape_from_config",
]
