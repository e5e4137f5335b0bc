"""What a run came to: a compact block for people, within 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from specter_runtime.cli.options import System, policy_name, today
from specter_sim.units import format_bytes, format_rate, format_time

if TYPE_CHECKING:
    from specter_runtime.session import Session
    from specter_sim.results import Result

COLUMNS = 80
_LABEL = 11


def conditions(session: Session, system: System) -> str:
    """Model, device, link, policy, slots and date: what every figure has to say."""
    checkpoint, config = session.checkpoint, session.prepared.config
    return " · ".join(
        (
            f"{checkpoint.name}, {checkpoint.precision}",
            _device(session),
            f"policy {policy_name(system, config)}",
            _slots(session),
            threads(torch.get_num_threads()),
            today(),
        )
    )


def summary(session: Session, system: System) -> str:
    """The block that ends a run. Raises SpecterError when nothing was decoded."""
    result = session.result()
    lines = [
        ("time", _time(result)),
        ("tokens", _tokens(result)),
        ("experts", _experts(result)),
        ("device", _device_bytes(session)),
        ("host", f"{format_bytes(session.budget.host_bytes)} of routed experts"),
        ("conditions", conditions(session, system)),
        *(("note", note) for note in notes(session, result)),
    ]
    return block(lines)


def threads(count: int) -> str:
    """ "1 CPU thread"."""
    return f"{count} CPU thread{'s' if count > 1 else ''}"


def block(lines: list[tuple[str, str]]) -> str:
    """Labels and texts, wrapped."""
    return "\n".join(
        textwrap.fill(
            f"{label:<{_LABEL}} {text}",
            COLUMNS,
            subsequent_indent=" " * (_LABEL + 1),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for label, text in lines
    )


def memory(session: Session) -> dict[str, int | None]:
    """Device bytes by purpose, planned and at the peak, and the host's."""
    budget = session.budget
    return {
        "cap_bytes": budget.cap_bytes,
        "peak_device_bytes": session.peak_device_bytes,
        "total_bytes": budget.total_bytes,
        "dense_bytes": budget.fixed.dense_bytes,
        "draft_bytes": budget.fixed.draft_bytes,
        "slot_bytes": budget.slot_bytes + budget.staging_bytes,
        "kv_bytes": budget.fixed.kv_bytes,
        "scratch_bytes": budget.fixed.scratch_bytes,
        "host_bytes": budget.host_bytes,
    }


def metrics(result: Result) -> dict[str, Any]:
    """The result's figures, without the notes, which are told apart."""
    return {key: value for key, value in result.row().items() if key != "notes"}


def notes(session: Session, result: Result) -> list[str]:
    """What a reader of the figures must know, each once."""
    told = list(dict.fromkeys((*session.notes, *result.notes)))
    if session.prepared.config.policy.depth != "governor":
        return told
    stopped = given_up([window.outcome.depth for window in session.windows])
    return [*told, stopped] if stopped else told


def given_up(depths: Sequence[int]) -> str:
    """What to say when a governor drafted, and then stopped; empty when it did not."""
    since = next((place for place, depth in enumerate(reversed(depths)) if depth), 0)
    if since < _SETTLED:
        return ""
    return (
        "speculation did not pay here and was stopped: nothing was drafted in the last "
        f"{since} of {len(depths)} windows"
    )


_SETTLED = 8
"""Windows without a draft after which a governor has given up, until it tries again."""


def _time(result: Result) -> str:
    return (
        f"TPOT {format_time(result.tpot_s)} ({result.tokens_per_s:.1f} tokens/s), "
        f"TTFT {format_time(result.ttft_s)} (prefill {format_time(result.prefill_s)}), "
        f"{_percent(stall_share(result))} of decoding stalled"
    )


def stall_share(result: Result) -> float:
    """Share of the decode time in which compute waited for loads."""
    stalled_s = result.stall_demand_s + result.stall_late_s + result.stall_join_s
    return stalled_s / result.decode_s if result.decode_s else 0.0


def _tokens(result: Result) -> str:
    text = f"{result.committed_tokens} in {result.windows} windows"
    if not result.mean_depth:
        return f"{text}, nothing drafted"
    return (
        f"{text}: acceptance {_percent(result.acceptance)} at mean depth {result.mean_depth:.1f}, "
        f"{result.tokens_per_window:.2f} tokens a window"
    )


def _experts(result: Result) -> str:
    return (
        f"hit rate {_percent(result.hit_rate)} (and {_percent(result.pending_rate)} pending), "
        f"{format_bytes(result.bytes_per_token)} a token over the link"
    )


def _device(session: Session) -> str:
    kind = session.prepared.options.device.value
    if kind != "emulated":
        return f"{kind} device"
    return f"{kind} device, link {format_rate(session.prepared.link.bytes_per_s)}"


def _slots(session: Session) -> str:
    groups = session.budget.groups
    if len(groups) == 1 < session.budget.layers:
        return f"a pool of {groups[0]} slots"
    each = str(groups[0]) if len(set(groups)) == 1 else f"{min(groups)} to {max(groups)}"
    return f"{each} slots a layer"


def _device_bytes(session: Session) -> str:
    budget = session.budget
    cap = "no cap" if budget.cap_bytes is None else f"cap {format_bytes(budget.cap_bytes)}"
    parts = {
        "dense": budget.fixed.dense_bytes,
        "draft": budget.fixed.draft_bytes,
        "slots": budget.slot_bytes + budget.staging_bytes,
        "KV": budget.fixed.kv_bytes,
        "scratch": budget.fixed.scratch_bytes,
    }
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    peak, planned = format_bytes(session.peak_device_bytes), format_bytes(budget.total_bytes)
    return f"peak {peak}, planned {planned}, {cap}: {listed}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
