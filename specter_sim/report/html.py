"""A sweep as one HTML page that needs nothing else: no network, no other file.

The page's style and script are inline and named by their hashes in its content security policy, so
that nothing else could run even if a name from a user's file were not escaped.
"""

import base64
import hashlib
import math
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

from specter_sim.report.answer import answer, best_of_places, question_of
from specter_sim.report.assumptions import assumptions, definitions
from specter_sim.report.markup import Html, element, join, paragraph, table
from specter_sim.report.pareto_svg import pareto_figure
from specter_sim.report.row_table import (
    MOST_SAMPLED,
    columns_of,
    embedded_json,
    embedded_rows,
    table_html,
)
from specter_sim.report.rows import (
    Row,
    conditions,
    depth_label,
    policy_label,
    short_name,
    value_text,
)
from specter_sim.report.sensitivity import AxisEffect, ValueEffect, sensitivities, summary
from specter_sim.report.study import Study, evenly
from specter_sim.report.tables import METRIC_COLUMNS
from specter_sim.report.time_bars import time_figure
from specter_sim.report.validation import ValidatedPoint, differences, nearest
from specter_sim.units import format_bytes, format_time
from specter_traces.files import write_atomic

MOST_AXIS_VALUES = 12
MOST_DRAWN = 4  # places with figures of their own
NEVER_VALIDATED = (
    "No prediction of this kind has been validated against a measurement yet. Compare "
    "configurations with each other, and measure before you rely on a number."
)


def write_report(study: Study, path: Path) -> Path:
    """Write the page. Raises UsageError when the folder cannot be written."""
    return write_atomic(path, page(study))


def page(study: Study) -> Html:
    """The whole page of a study with at least one row."""
    style, script = _packaged("page.css"), _packaged("page.js")
    title = question_of(study)
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"Specter: {title}"),
        element("style", style),
    )
    body = element("body", element("main", *_sections(study)), element("script", script))
    return join([Html("<!doctype html>\n"), element("html", head, body, lang="en"), Html("\n")])


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _packaged(name: str) -> Html:
    return Html((files("specter_sim.report") / name).read_text(encoding="utf-8"))


def _sections(study: Study) -> list[Html]:
    if not study.shown:
        return [_answer(study), _section("assumptions", "Assumptions", assumptions(study.rows))]
    embedded = embedded_rows(study.places)
    return [
        _answer(study),
        _pareto(study, embedded),
        _rows(study, embedded),
        _time(study),
        _sensitivity(study),
        _validated(study),
        _section("assumptions", "What this rests on", assumptions(study.rows)),
        _section("definitions", "Terms", definitions()),
        _footer(study),
    ]


def _section(name: str, title: str, *content: str) -> Html:
    return element("section", element("h2", title), *content, id=name)


# --- sections -------------------------------------------------------------------------------------


def _answer(study: Study) -> Html:
    failed = len(study.failures)
    remarks = [
        *study.remarks,
        *([f"{failed} could not run, the first because {study.failures[0]}"] if failed else []),
        *_left_out(study),
    ]
    return element(
        "header",
        element("h1", question_of(study)),
        paragraph(answer(study), id="answer"),
        paragraph(study.speculation.text, id="verdict"),
        paragraph(conditions(study.rows, study.date), class_="conditions"),
        _places(study),
        *(paragraph(remark, class_="remark") for remark in remarks),
    )


def _left_out(study: Study) -> list[str]:
    untimed = sum(not row.get("tpot_s") for row in study.rows)
    large = len(study.rows) - untimed - len(study.shown)
    told = []
    if untimed:
        told.append(f"{untimed} results have no TPOT and are left out.")
    if large:
        told.append(f"{large} configurations need more memory than the device has: left out.")
    return told


def _places(study: Study) -> Html:
    """The answer for each place, since the best place is seldom what was asked for."""
    found = best_of_places(study)
    if len(found) < 2:
        return Html()
    keys, count = study.keys, len(study.places)
    lines = [
        (
            title,
            METRIC_COLUMNS["TPOT"](row),
            METRIC_COLUMNS["tok/s"](row),
            f"{policy_label(row, keys)}, depth {depth_label(row)}",
            f"{float(row['slots_per_layer']):g}",
        )
        for title, row in found
    ]
    told = f"{len(found)} of {count} places" if len(found) < count else f"each of {count} places"
    named = paragraph(f"The best of {told}:")
    headers = ("where", "TPOT", "tok/s", "system", "slots")
    return join([named, table(headers, lines, right=(1, 2, 4))])


def _pareto(study: Study, embedded: Sequence[Row]) -> Html:
    kept = {id(row) for row in embedded}
    places = [
        (title, [row for row in group if id(row) in kept])
        for title, group in evenly(study.places, MOST_DRAWN)
    ]
    drawn = pareto_figure(places, study.keys)
    told = (
        "Each mark is a configuration; down and left is better. No configuration beats one on the "
        f"line in both time and memory. {_chosen_places(study)}"
    )
    return _section("pareto", "Time against memory", paragraph(told), drawn)


def _chosen_places(study: Study) -> str:
    count = len(study.places)
    return f"{MOST_DRAWN} of {count} places are drawn." if count > MOST_DRAWN else ""


def _rows(study: Study, embedded: Sequence[Row]) -> Html:
    columns = columns_of(embedded, study.keys, study.place_keys)
    told = f"All {len(embedded)} configurations that fit, the fastest first."
    if len(embedded) < len(study.shown):
        told = (
            f"{len(embedded)} of {len(study.shown)} configurations that fit: the fastest, the "
            f"Pareto front, and {MOST_SAMPLED} of the others, evenly spaced by rank. All are in "
            "results.csv."
        )
    data = element("script", embedded_json(columns), type="application/json", id="rows-data")
    help_text = "A column's head sorts by it, once more the other way round."
    noted = paragraph(f"{told} {help_text}")
    return _section("configurations", "Configurations", noted, table_html(columns), data)


def _time(study: Study) -> Html:
    best = study.best or min(study.shown, key=lambda row: float(row["tpot_s"]))
    most_bytes = float(best["device_bytes"])
    told = (
        "Decoding time a committed token, by cause, of the best run of each system within "
        f"{format_bytes(most_bytes)}, the memory of the best configuration. {_chosen_places(study)}"
    )
    drawn = time_figure(evenly(study.places, MOST_DRAWN), study.keys, most_bytes)
    return _section("time", "Where the time goes", paragraph(told), drawn)


def _sensitivity(study: Study) -> Html:
    effects = sensitivities(study.real)
    title = "What TPOT depends on"
    if not effects:
        return _section("sensitivity", title, paragraph("Nothing varies among the usable rows."))
    told = (
        f"{summary(effects)} For each value: the best and the median TPOT over the rows that have "
        "it; the bars go from one to the other, on one logarithmic scale. Axes that changed "
        "together in the sweep are not told apart."
    )
    scale = _log_position(effects)
    figures = [_axis(effect, scale) for effect in effects]
    return _section(
        "sensitivity", title, paragraph(told), element("div", *figures, class_="panels")
    )


def _log_position(effects: Sequence[AxisEffect]) -> Callable[[float], float]:
    """Where a time lies on the common scale of all axes, from 0 to 100."""
    values = [value for effect in effects for value in effect.values]
    low = min(value.best_s for value in values)
    span = math.log(max(value.median_s for value in values) / low) or 1.0
    return lambda time_s: 100 * math.log(time_s / low) / span


def _axis(effect: AxisEffect, position: Callable[[float], float]) -> Html:
    values = effect.leading(MOST_AXIS_VALUES)
    left = len(effect.values) - len(values)
    caption = (
        f"{effect.name}: x{effect.effect:.2f} between its best and worst value "
        f"(x{effect.median_effect:.2f} in the median)"
    )
    more = [paragraph(f"{left} values between these are left out.")] if left else []
    lines = (_value(value, position) for value in values)
    return element("figure", element("figcaption", caption), *lines, *more)


def _value(value: ValueEffect, position: Callable[[float], float]) -> Html:
    start, end = round(position(value.best_s), 1), round(position(value.median_s), 1)
    bar = element(
        "svg",
        element("rect", x=start, y=4, width=round(end - start, 1), height=4, class_="range"),
        element("rect", x=start - 0.5, y=1, width=1, height=10, class_="least"),
        viewBox="-0.5 0 101 12",
        preserveAspectRatio="none",
        class_="bar",
        aria_hidden="true",
    )
    rows = f"{value.count} row{'' if value.count == 1 else 's'}"
    head = element("div", element("span", value.text), element("b", format_time(value.best_s)))
    told = element("small", f"median {format_time(value.median_s)}, {rows}")
    return element("div", head, bar, told, class_="system")


def _validated(study: Study) -> Html:
    title = "The nearest validated point"
    if study.best is None or (point := nearest(study.points, study.best)) is None:
        return _section("validation", title, paragraph(NEVER_VALIDATED, class_="remark"))
    return _section("validation", title, *_point(point, study.best))


def _point(point: ValidatedPoint, best: Row) -> list[Html]:
    apart = differences(point, best)
    told = (
        f"{point.name} ({point.date}, {point.machine}): {point.metric} was predicted as "
        f"{_measure(point.metric, point.predicted)} and measured as "
        f"{_measure(point.metric, point.measured)}, {abs(point.error):.1%} "
        f"{'above' if point.error > 0 else 'below'} the measurement. Source: {point.source}"
    )
    lines = [
        (short_name(key), value_text(key, best.get(key)), value_text(key, point.config[key]))
        for key in apart
    ]
    if not lines:
        return [paragraph(told), paragraph("The best configuration is this very point.")]
    noted = "The best configuration of this sweep differs from it, so its error may too:"
    return [paragraph(told), paragraph(noted), table(("", "best here", "validated"), lines)]


def _measure(metric: str, value: float) -> str:
    return format_time(value) if metric.endswith("_s") else f"{value:.4g}"


def _footer(study: Study) -> Html:
    times = sorted(str(row["computed_at"]) for row in study.rows if row.get("computed_at"))
    computed = f" Computed {times[0]} to {times[-1]}." if times else ""
    told = f"Written on {study.date} by specter-sim {study.version}.{computed}"
    return element("footer", paragraph(told))
