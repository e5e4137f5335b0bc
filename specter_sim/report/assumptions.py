"""What the numbers of a report rest on, each with where it comes from."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specter_sim.config import build, nest
from specter_sim.hardware import Machine, ModelShape, find_machine, find_model
from specter_sim.hardware.forms import CODED_SHARE, REFINEMENT_SHARE
from specter_sim.policies import DEPTH, EVICTION, PREFETCH
from specter_sim.report.answer import USABILITY_RULE
from specter_sim.report.markup import Html, element, join, paragraph, table
from specter_sim.report.rows import Row, short_name, value_text, varying
from specter_sim.report.tables import marks
from specter_sim.setup.memory import machine_of
from specter_sim.units import format_bytes, format_rate, format_time
from specter_traces.errors import SpecterError

MOST_MACHINES = 6
MOST_NOTES = 20
MOST_VALUES = 6
BY_SWEEP = "set by this sweep"
FORMS = {
    "plain": "plain: loaded and kept as the checkpoint stores it; a draft is a separate resident "
    "copy with one 16-bit scale a group.",
    "coded": f"coded: the same weights, bit for bit, in {CODED_SHARE} of the BF16 bytes, in the "
    "load and in the slot; expanded at each use. The share was measured on Gaussian weights.",
    "coded-base": "coded-base: a resident low-bit base is the draft, and what is loaded is the "
    "refinement, "
    + ", ".join(f"{share} of the BF16 bytes at {b} bits" for b, share in REFINEMENT_SHARE.items())
    + "; measured on Gaussian weights with scales per 128.",
}
ACCEPTANCE = {
    "auto": "greedy if the trace was decoded greedily, else sampled",
    "greedy": "a draft token counts when it is the target's own choice",
    "sampled": "a draft token counts with the trace's probability that a sampled one is accepted",
}
DEFINITIONS = {
    "TPOT": "time per output token: (last commit - first commit) / tokens committed after the "
    "first commit. The prompt is not in it. A time over all windows, not a mean of windows.",
    "TPOT p99": "window time a committed token that 99 % of the tokens stay below.",
    "tok/s": "committed tokens / seconds of decoding.",
    "device memory": "everything charged: dense weights, draft or base, slots, KV cache, buffers.",
    "equal memory": "speculation is judged against the same system without a draft, with the "
    "draft's memory turned into slots.",
    "slot": "device memory for one expert of one layer.",
    "hits, pending": "experts found resident, or still being loaded, when a layer of a window "
    "demanded them; shares of all demands.",
    "link B/token": "bytes over the link a committed token, prefetches that were wasted included.",
    "useful, late, wasted": "prefetches that arrived before their demand, that were demanded while "
    "loading, that were never used.",
    "stall": "seconds compute waited: for a demand load, for a late prefetch, for the join before "
    "a verify pass.",
    "x bound": "decoding time / the least time any schedule could take for the same windows from "
    "the same residents.",
    "(bound)": "the policy knows the routes to come. No system does; never the answer.",
    "usable": USABILITY_RULE + ".",
}


def assumptions(rows: Sequence[Row]) -> Html:
    """Everything the rows rest on, as sections; the rows are not empty."""
    return join(
        [
            *(_machine(name, rows) for name in distinct(rows, "machine.name")[:MOST_MACHINES]),
            _times(),
            _models(rows),
            _routes(rows),
            _forms(rows),
            _policies(rows),
            _notes(rows),
            _settings(rows),
        ]
    )


def definitions() -> Html:
    """The terms of the report."""
    pairs = (
        join([element("dt", term), element("dd", meaning)]) for term, meaning in DEFINITIONS.items()
    )
    return element("dl", *pairs)


def distinct(rows: Iterable[Row], key: str) -> list[str]:
    """The values of a key in the rows, as text, in their order."""
    return list(dict.fromkeys(str(row[key]) for row in rows if row.get(key) is not None))


def used_machines(name: str, rows: Sequence[Row]) -> list[Machine]:
    """The named machine as the rows' configurations changed it, every version once."""
    versions: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.get("machine.name") == name:
            given = {key: value for key, value in row.items() if key.startswith("machine.")}
            versions.setdefault(repr(given), given)
    return [machine_of(build(nest(given))) for given in versions.values()]


def machine_rows(machine: Machine, used: Sequence[Machine]) -> list[tuple[str, str, str]]:
    """Field, value and source of every number of a machine, as it was used."""
    return [(dotted, *_number(machine, used, dotted)) for dotted in machine.sources]


def _machine(name: str, rows: Sequence[Row]) -> Html:
    try:
        machine, used = find_machine(name), used_machines(name, rows)
    except SpecterError as error:
        told = f"Its numbers and their sources cannot be shown: {error}."
        return join([element("h3", f"Machine {name}"), paragraph(told)])
    lines = machine_rows(machine, used)
    numbers = table(("number", "value", "source"), lines)
    marked = sum(source.startswith("assumption") for _, _, source in lines)
    told = f"{marked} of its {len(lines)} numbers are assumptions."
    title = element("h3", f"Machine {name}: {machine.title}")
    shown = element("details", element("summary", "all numbers and their sources"), numbers)
    return join([title, paragraph(told), _overridden(lines), shown])


def _overridden(lines: Sequence[tuple[str, str, str]]) -> Html:
    told = [f"{dotted} {value}" for dotted, value, source in lines if source.startswith(BY_SWEEP)]
    return paragraph(f"Set by this sweep: {'; '.join(told)}.") if told else Html()


def _number(machine: Machine, used: Sequence[Machine], dotted: str) -> tuple[str, str]:
    part, _, name = dotted.partition(".")
    value, source = quantity(name, getattr(getattr(machine, part), name)), machine.sources[dotted]
    if all(version.sources[dotted] == source for version in used):
        return value, source
    values = dict.fromkeys(getattr(getattr(version, part), name) for version in used)
    texts = [quantity(name, one) for one in sorted(values)]
    shown = texts if len(texts) <= MOST_VALUES else [texts[0], "…", texts[-1]]
    return ", ".join(shown), f"{BY_SWEEP}; the machine says {value}: {source}"


def quantity(name: str, value: Any) -> str:
    """A machine's number with its unit, which its name ends in."""
    if value is None:
        return "all"
    if name.endswith("bytes_per_s"):
        return format_rate(value)
    if name.endswith("flops_per_s"):
        return f"{value / 1e12:.4g} TFLOPS"
    if name.endswith("_s"):
        return format_time(value)
    if name.endswith("_bytes"):
        return format_bytes(value, binary=value % 2**20 == 0)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _times() -> Html:
    told = (
        "No device ran. Every time is computed from these numbers: a step takes as long as its "
        "arithmetic or its memory reads, whichever is longer, plus the start of its kernels; loads "
        "queue on one simulated link. What the formulas leave out is not in the results."
    )
    return join([element("h3", "Times"), paragraph(told)])


def _models(rows: Sequence[Row]) -> Html:
    parts = [element("h3", "Model")]
    for name in distinct(rows, "model"):
        try:
            parts.append(paragraph(model_text(find_model(name))))
        except SpecterError as error:
            parts.append(paragraph(f"{name}: its shape cannot be shown: {error}."))
    return join(parts)


def model_text(shape: ModelShape) -> str:
    """A model's shape in one sentence, with its source."""
    return (
        f"{shape.name}: {shape.moe_layers} MoE layers of {shape.num_experts} experts, top-"
        f"{shape.top_k}, {format_bytes(shape.expert_bytes())} an expert as stored "
        f"({shape.expert_format.value}); source: {shape.source}."
    )


def _routes(rows: Sequence[Row]) -> Html:
    traces = distinct(rows, "trace_name") or distinct(rows, "trace.path")
    modes = [f"{mode}: {ACCEPTANCE.get(mode, '?')}" for mode in distinct(rows, "trace.acceptance")]
    marked = Counter(mark for row in rows for mark in marks(row))
    told = [
        f"Routes are replayed from {', '.join(traces)}; "
        f"{', '.join(distinct(rows, 'trace.tokens'))} tokens are decoded a configuration.",
        f"Acceptance ({'; '.join(modes)}). After a rejected draft token the routes of the "
        "rejected positions are those of the accepted text: an approximation.",
        *(f"{count} of {len(rows)} rows: {mark}." for mark, count in marked.items()),
    ]
    if not marked:
        told.append("All routes were recorded from a model that ran; no draft is assumed.")
    return join([element("h3", "Trace and acceptance"), *map(paragraph, told)])


def _forms(rows: Sequence[Row]) -> Html:
    used = distinct(rows, "experts.form")
    items = (element("li", FORMS.get(form, form)) for form in used)
    return join([element("h3", "Forms of experts"), element("ul", *items)])


def _policies(rows: Sequence[Row]) -> Html:
    kinds: Mapping[str, Mapping[str, Any]] = {
        "eviction": EVICTION,
        "prefetch": PREFETCH,
        "depth": DEPTH,
    }
    lines = []
    for kind, known in kinds.items():
        for name in distinct(rows, f"policy.{kind}"):
            info = known.get(name)
            summary, source = (info.summary, info.source) if info else ("a policy of your own", "")
            lines.append((f"{kind} {name}", summary, source))
    return join([element("h3", "Policies"), table(("policy", "what it does", "source"), lines)])


def _notes(rows: Sequence[Row]) -> Html:
    counted = Counter(
        note for row in rows for note in str(row.get("notes") or "").split("; ") if note
    )
    if not counted:
        return Html()
    items = [
        element("li", f"{note} ({count} of {len(rows)} rows)")
        for note, count in counted.most_common(MOST_NOTES)
    ]
    left = len(counted) - len(items)
    if left > 0:
        items.append(element("li", f"{left} more notes are in results.csv"))
    return join([element("h3", "Notes of the results"), element("ul", *items)])


def _settings(rows: Sequence[Row]) -> Html:
    keys = varying(rows)
    first = rows[0]
    parts = ("model", "preset", "trace.", "machine.", "memory.", "experts.", "policy.")
    fixed = [
        (key, value_text(key, value))
        for key, value in first.items()
        if key.startswith(parts) and key not in keys and value is not None
    ]
    summary = element("summary", "settings that all rows share")
    shown = element("details", summary, table(("key", "value"), fixed))
    names = ", ".join(dict.fromkeys(map(short_name, keys))) or "nothing"
    return join([element("h3", "Settings"), paragraph(f"Varied: {names}."), shown])
