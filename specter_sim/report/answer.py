"""The question a sweep was made for, and its answer in one sentence."""

from collections.abc import Sequence

from specter_sim.report.rows import (
    Row,
    best_by,
    panel_keys,
    values_text,
)
from specter_sim.report.study import Speculation, Study, evenly
from specter_sim.report.tables import METRIC_COLUMNS
from specter_sim.report.verdict import judge
from specter_sim.units import format_bytes

# People read 238 words a minute silently (Brysbaert 2019, a review of 190 studies); at an assumed
# 1.3 tokens a word, 5.2 tokens a second.
READING_TOKENS_PER_S = 5.2
SLOWEST_TOKENS_PER_S = 1.0
USABILITY_RULE = (
    f"usable means at least {READING_TOKENS_PER_S:g} tokens a second, the pace of silent reading "
    "(238 words a minute, Brysbaert 2019; 1.3 tokens a word is an assumption); below "
    f"{SLOWEST_TOKENS_PER_S:g} token a second nobody waits for it; first tokens are not judged"
)
MOST_LISTED = 24
_DEPTHS = {"never": "without drafting", "governor": "drafting as deep as the governor allows"}


def question_of(study: Study) -> str:
    """The sweep's own question, else the one every sweep answers."""
    if study.question:
        return study.question
    models = list(dict.fromkeys(str(row.get("model")) for row in study.rows))
    machines = list(dict.fromkeys(str(row.get("machine.name")) for row in study.rows))
    model = models[0] if len(models) == 1 else f"one of {len(models)} models"
    machine = machines[0] if len(machines) == 1 else f"one of {len(machines)} machines"
    return f"Which configuration decodes {model} fastest on {machine}, and does drafting pay?"


def answer(study: Study) -> str:
    """One sentence: the best configuration, its TPOT, the verdict on drafting, and usability."""
    best = study.best
    if best is None:
        return (
            f"No configuration can be used: of {len(study.rows)} results none fits on the device "
            "without knowing the future."
        )
    return (
        f"{METRIC_COLUMNS['TPOT'](best)} a token ({METRIC_COLUMNS['tok/s'](best)} tokens/s) is the "
        f"best of {len(study.real)} configurations, reached by {configuration_text(best)}, on "
        f"{best.get('machine.name')}{_place_text(study, best)}; "
        f"{speculation_text(study.speculation)}; {usability(float(best['tpot_s']))}."
    )


def configuration_text(row: Row) -> str:
    """A row's system and memory in words."""
    prefetch = row.get("policy.prefetch")
    parts = [
        f"{row.get('experts.form')} experts",
        f"{row.get('policy.eviction')} eviction",
        "no prefetch" if prefetch == "none" else f"{prefetch} prefetch",
        _depth_text(row),
        f"{float(row['slots_per_layer']):g} slots a MoE layer "
        f"({format_bytes(float(row['device_bytes']))} of device memory)",
    ]
    named = f"the preset {row['preset']}: " if row.get("preset") else ""
    return named + ", ".join(parts)


def usability(tpot_s: float) -> str:
    """Whether anybody would use the model at this speed, by `USABILITY_RULE`."""
    rate = 1 / tpot_s
    if rate >= READING_TOKENS_PER_S:
        pace = rate / READING_TOKENS_PER_S
        return f"the model is usable at this speed, x{_short(pace)} the pace of reading"
    if rate >= SLOWEST_TOKENS_PER_S:
        return "the model is slower than people read at this speed: usable for work that can wait"
    return "the model is not usable in a conversation at this speed"


def speculation_text(speculation: Speculation) -> str:
    """The verdict on drafting as a clause."""
    if speculation.pays is None or not speculation.speedup:
        return "whether speculation pays is not known"
    if speculation.pays:
        return f"speculation pays (x{speculation.speedup:.2f} against no draft at equal memory)"
    slower = 1 / speculation.speedup
    return f"speculation does not pay (x{slower:.2f} slower than no draft at equal memory)"


def speculation_from_rows(rows: Sequence[Row]) -> Speculation | None:
    """The verdict from the rows alone: the best that drafts against the best that does not.

    Both in the best row's place and within its memory; None when one side has no row.
    """
    best = best_by(rows)
    if best is None:
        return None
    keys = panel_keys(rows)
    near = [
        row
        for row in rows
        if row["device_bytes"] <= best["device_bytes"]
        and all(row.get(key) == best.get(key) for key in keys)
    ]
    with_draft = best_by(row for row in near if row.get("policy.depth") != "never")
    without = best_by(row for row in near if row.get("policy.depth") == "never")
    if with_draft is None or without is None:
        return None
    verdict = judge(with_draft, without)
    told = f"{verdict.text} (the fastest rows of this sweep, within the best one's memory)"
    return Speculation(verdict.pays, verdict.speedup, told)


def best_of_places(study: Study) -> list[tuple[str, Row]]:
    """The fastest usable row of every place, evenly chosen when there are very many."""
    found = ((title, best_by(group)) for title, group in evenly(study.places, MOST_LISTED))
    return [(title, row) for title, row in found if row is not None]


def _place_text(study: Study, row: Row) -> str:
    keys = [key for key in study.place_keys if key != "machine.name"]
    return f" with {values_text(row, keys)}" if keys else ""


def _short(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.3g}"


def _depth_text(row: Row) -> str:
    rule, depth = str(row.get("policy.depth")), row.get("policy.depth_params.depth")
    if rule == "fixed" and depth is not None:
        return f"drafting {depth} token{'' if depth == 1 else 's'} ahead"
    return _DEPTHS.get(rule, f"drafting as deep as the rule {rule} says")
