"""What `specter-sim tune` prints: tables for people, one document for machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from specter_sim.cli.options import today
from specter_sim.config import flatten, resolved
from specter_sim.report.rows import conditions
from specter_sim.report.tables import marks, render
from specter_sim.report.verdict import judge
from specter_sim.results import Result
from specter_sim.setup.memory import machine_of
from specter_sim.tune.choice import BASELINE
from specter_sim.tune.scores import Objective
from specter_sim.tune.space import Space
from specter_sim.tune.tuning import Standing, Tuning, Worth
from specter_sim.units import format_bytes, format_duration, format_time

Document = dict[str, Any]
CLEAR = 1.005  # factors nearer to one than this are told as equal


def document(found: Tuning, space: Space, best: Path) -> Document:
    """Everything that was found out, as plain values."""
    return {
        "date": today(),
        "budget_bytes": space.budget_bytes,
        "objective": str(found.objective),
        "halves": {"tuned": "even sequences", "held_out": "odd sequences"},
        "winner": _told(found.winner)
        | {
            "config": resolved(found.winner.config),
            "whole": found.whole.row(),
            "held_out_rank": found.held_out_rank,
            "equal_choices": found.equal,
        },
        "runner_up": found.runner_up and _told(found.runner_up),
        "finalists": [_seconds(one, found.objective) for one in found.finalists],
        "systems": [_seconds(one, found.objective) for one in found.systems],
        "cannot_run": found.missing,
        "better_on_held_out": [one.name for one in found.better_systems],
        "worth": [_worth(one, found.objective) for one in found.worth],
        "speculation": speculation(found),
        "notes": list(space.notes),
        "left_out": space.left_out,
        "best": str(best),
    }


def speculation(found: Tuning) -> Document:
    """Whether drafting pays: the winner against the best of the other kind, on held-out text."""
    drafting = found.winner if found.winner.choice.drafts else found.drafting
    plain = found.plain if found.winner.choice.drafts else found.winner
    if drafting is None or plain is None:
        kind = "that drafts" if drafting is None else "without a draft"
        text = f"no verdict on speculation: no choice {kind} is possible here"
        return {"pays": None, "speedup": None, "text": text}
    verdict = judge(drafting.held_out.row(), plain.held_out.row())
    text = f"{verdict.text} (held-out half; best without: {plain.name})"
    if not verdict.pays:
        text = f"{verdict.text} (held-out half; best with: {drafting.name})"
    return {
        "pays": verdict.pays,
        "speedup": verdict.speedup,
        "text": text,
        "with": _seconds(drafting, found.objective),
        "without": _seconds(plain, found.objective),
    }


def print_tuning(found: Tuning, space: Space, told: Document, top: int) -> None:
    """The answer, what it rests on, and what speaks against it."""
    link = {"link_bytes_per_s": machine_of(found.winner.config).link.bytes_per_s}
    row = flatten(resolved(found.winner.config)) | found.whole.row() | link
    typer.echo(conditions([row], today()))
    typer.echo(_question(found, space, told["search"]))
    typer.echo(f"\nwinner: {found.winner.name}\n{_winner(found)}\n")
    typer.echo(_table(found.finalists[:top], found.objective, "the best on the tuned half"))
    typer.echo(f"\n{_robustness(found)}\n")
    typer.echo(_table([found.winner, *found.systems], found.objective, "beside complete systems"))
    for name, reason in found.missing.items():
        typer.echo(f"{name} cannot run: {reason}")
    typer.echo(f"\n{_against_systems(found)}\n")
    typer.echo(_worth_table(found))
    typer.echo(f"\n{told['speculation']['text']}")
    for note in dict.fromkeys([*marks(row), *space.notes, *found.whole.notes]):
        typer.echo(f"note: {note}")


def _question(found: Tuning, space: Space, search: Document) -> str:
    wanted = "TPOT" if found.objective is Objective.TPOT else "the 99th percentile of TPOT"
    reused = f" ({search['reused']} of them earlier)" if search["reused"] else ""
    return (
        f"least {wanted} within {format_bytes(space.budget_bytes)}: {search['scored']} of "
        f"{search['space']} choices simulated{reused} in {format_duration(search['wall_s'])}, "
        f"{search['way']} search; tuned on the even sequences, checked on the odd ones"
    )


def _winner(found: Tuning) -> str:
    one, objective = found.winner, found.objective
    equal = f"; as fast as {found.equal} equivalent choices" if found.equal > 1 else ""
    equal = "; as fast as one equivalent choice" if found.equal == 1 else equal
    return (
        f"tuned half {_time(one.tuning, objective)}, held-out half "
        f"{_time(one.held_out, objective)}, whole trace {_time(found.whole, objective)} "
        f"({found.whole.tokens_per_s:.1f} tokens/s); {_slots(one.config, found.whole)}{equal}"
    )


def _slots(config: Any, result: Result) -> str:
    each = config.memory.slots_per_layer
    if each is None:
        return f"{result.slots_per_layer:g} slots a layer"
    return f"{', '.join(map(str, each))} slots from the first layer to the last"


def _robustness(found: Tuning) -> str:
    count, rank = len(found.finalists), found.held_out_rank
    second = found.runner_up
    text = f"on the held-out half the winner is number {rank} of the {count} best"
    if second is None:
        return text
    ratio = found.objective.of(second.held_out) / found.objective.of(found.winner.held_out)
    return f"{text}; the runner-up is {_factor(ratio)} there"


def _against_systems(found: Tuning) -> str:
    if not found.systems:
        return "no complete system runs within this budget"
    mine = found.objective.of(found.winner.held_out)
    better = found.better_systems
    if better:
        told = ", ".join(
            f"{one.name} ({_time(one.held_out, found.objective)}, "
            f"x{mine / found.objective.of(one.held_out):.3f} faster)"
            for one in better
        )
        return (
            f"WARNING: on the held-out half the winner is beaten by {told}: what was tuned does "
            "not carry over; tune on more tokens or take that one"
        )
    first = found.systems[0]
    ratio = found.objective.of(first.held_out) / mine
    return f"no complete system is faster on the held-out half; {first.name} is {_factor(ratio)}"


def _factor(ratio: float) -> str:
    if 1 / CLEAR < ratio < CLEAR:
        return "within 0.5 %"
    return f"x{ratio:.2f} slower" if ratio > 1 else f"x{1 / ratio:.2f} faster"


def _table(standings: Sequence[Standing], objective: Objective, title: str) -> str:
    other = f"{_other(objective)} held out"
    headers = [title, "tuned", "held out", other, "hits", "link B/token", "slots", "device"]
    return render(headers, [[one.name, *_cells(one, objective)] for one in standings])


def _other(objective: Objective) -> Objective:
    return Objective.P99 if objective is Objective.TPOT else Objective.TPOT


def _cells(one: Standing, objective: Objective) -> list[str]:
    result = one.held_out
    return [
        _time(one.tuning, objective),
        _time(result, objective),
        _time(result, _other(objective)),
        f"{100 * result.hit_rate:.1f} %",
        format_bytes(result.bytes_per_token),
        f"{result.slots_per_layer:.1f}",
        format_bytes(result.device_bytes),
    ]


def _worth_table(found: Tuning) -> str:
    headers = [
        "choice",
        "value",
        "set back to",
        "tuned",
        "held out",
        "alone, held out",
        "next best",
    ]
    return render(headers, [_worth_cells(one, found) for one in found.worth])


def _worth_cells(one: Worth, found: Tuning) -> list[str]:
    objective, winner = found.objective, found.winner
    if one.without is None:
        back = [one.reason or "-", "", ""]
    else:
        changed = _also(one, winner)
        back = [
            f"{one.usual}{changed}",
            _against(one.without.tuning, winner.tuning, objective),
            _against(one.without.held_out, winner.held_out, objective),
        ]
    alone = "" if one.alone is None else _time(one.alone.held_out, objective)
    return [one.dimension.replace("_", " "), one.value, *back, alone, _next(one, winner, objective)]


def _also(one: Worth, winner: Standing) -> str:
    """What had to change with a choice that was set back."""
    assert one.without is not None
    before, after = asdict(winner.choice), asdict(one.without.choice)
    changed = [
        str(after[name])
        for name in before
        if name not in (one.dimension, "draft_bits") and before[name] != after[name]
    ]
    return f", {', '.join(changed)}" if changed else ""


def _next(one: Worth, winner: Standing, objective: Objective) -> str:
    if one.next_best is None:
        return ""
    value, seconds = one.next_best
    return f"{value} {_percent(seconds / objective.of(winner.tuning))}"


def _against(result: Result, winner: Result, objective: Objective) -> str:
    return f"{_time(result, objective)} {_percent(objective.of(result) / objective.of(winner))}"


def _percent(ratio: float) -> str:
    return f"({100 * (ratio - 1):+.1f} %)"


def _time(result: Result, objective: Objective) -> str:
    return format_time(objective.of(result))


def _told(one: Standing) -> Document:
    return {
        "name": one.name,
        "choice": asdict(one.choice),
        "tuned": one.tuning.row(),
        "held_out": one.held_out.row(),
    }


def _seconds(one: Standing, objective: Objective) -> Document:
    return {
        "name": one.name,
        "choice": asdict(one.choice),
        "tuned_s": objective.of(one.tuning),
        "held_out_s": objective.of(one.held_out),
        "device_bytes": one.held_out.device_bytes,
    }


def _worth(one: Worth, objective: Objective) -> Document:
    value, seconds = one.next_best or (None, None)
    return {
        "dimension": one.dimension,
        "value": one.value,
        "baseline": asdict(BASELINE)[one.dimension],
        "without": one.without and _seconds(one.without, objective),
        "alone": one.alone and _seconds(one.alone, objective),
        "reason": one.reason,
        "next_best": value,
        "next_best_s": seconds,
    }
