"""Does speculation pay? A run with drafts against its twin without, at equal device memory."""

from dataclasses import dataclass

from specter_sim.report.rows import Row
from specter_sim.units import format_time

_STALLS = ("stall_demand_s", "stall_late_s", "stall_join_s")


@dataclass(frozen=True)
class Verdict:
    """The answer in words and numbers; `speedup` is without ÷ with, above 1 when drafting wins."""

    pays: bool
    speedup: float
    text: str


def judge(with_draft: Row, without: Row) -> Verdict:
    """Compare a speculating run with its twin that never drafts, and name the deciding cause."""
    speedup = float(without["tpot_s"]) / float(with_draft["tpot_s"])
    pays = speedup > 1.0
    changes = _changes_s(with_draft, without)
    if pays:
        cause, change_s = min(changes.items(), key=lambda item: item[1])
        text = f"speculation pays: x{speedup:.2f} against no draft at equal memory"
        if change_s < 0:
            text += f"; {cause} {_per_token(change_s)}{_detail(cause, with_draft, without)}"
        return Verdict(pays, speedup, text)
    cause, change_s = max(changes.items(), key=lambda item: item[1])
    why = f"{cause} {_per_token(change_s)}{_detail(cause, with_draft, without)}"
    text = (
        f"do not speculate here, because it is x{1 / speedup:.2f} slower than no draft "
        f"at equal memory: {why}"
    )
    return Verdict(pays, speedup, text)


def _changes_s(with_draft: Row, without: Row) -> dict[str, float]:
    """Seconds a token that drafting adds (or, negative, saves), by cause."""

    def per_token(row: Row, *keys: str) -> float:
        return sum(float(row[key]) for key in keys) / max(1, int(row["committed_tokens"]))

    return {
        "drafting costs": per_token(with_draft, "draft_s") - per_token(without, "draft_s"),
        "verify compute": per_token(with_draft, "compute_s") - per_token(without, "compute_s"),
        "waiting for experts": per_token(with_draft, *_STALLS) - per_token(without, *_STALLS),
    }


def _per_token(change_s: float) -> str:
    return f"{'+' if change_s >= 0 else '-'}{format_time(abs(change_s))} a token"


def _detail(cause: str, with_draft: Row, without: Row) -> str:
    if cause != "waiting for experts":
        accepted = float(with_draft["acceptance"])
        committed = float(with_draft["tokens_per_window"])
        return f" (acceptance {accepted:.2f}, {committed:.1f} tokens a window)"
    more, less = float(with_draft["bytes_per_token"]), float(without["bytes_per_token"])
    moved = f"x{more / less:.2f} the bytes a token" if less > 0 else "more bytes a token"
    slots = f"{float(with_draft['slots_per_layer']):.1f} slots a layer"
    return f" ({moved}, {slots} against {float(without['slots_per_layer']):.1f})"
