"""The twin of a configuration on the other side of the question whether to speculate."""

from specter_sim.config import RunConfig, Table, build, resolved
from specter_sim.setup.rules import prefetch_of


def drafts(config: RunConfig) -> bool:
    """Whether a configuration may draft."""
    return config.policy.depth != "never"


def twin_of(config: RunConfig, device_bytes: int) -> RunConfig:
    """The same system without its draft (or with one), in the same device memory.

    Without a draft, a base is of no use: its experts are coded without one. With a draft, the depth
    is governed and prefetch continuous: the twin is meant to win if drafting can.
    """
    changes = _without_draft(config) if drafts(config) else _with_draft(config)
    return build(resolved(config), {"preset": "none"}, changes, _in_memory(device_bytes))


def _without_draft(config: RunConfig) -> Table:
    follows_draft = "paired" in prefetch_of(config).needs
    prefetch = "none" if follows_draft else config.policy.prefetch
    form = "coded" if config.experts.form == "coded-base" else config.experts.form
    return {"policy": {"depth": "never", "prefetch": prefetch}, "experts": {"form": form}}


def _with_draft(config: RunConfig) -> Table:
    form = "coded-base" if config.experts.form == "coded" else config.experts.form
    bits = config.experts.draft_bits or 4
    return {
        "policy": {"depth": "governor", "prefetch": "continuous"},
        "experts": {"form": form, "draft_bits": bits},
    }


def _in_memory(device_bytes: int) -> Table:
    return {"memory": {"budget": device_bytes}}
