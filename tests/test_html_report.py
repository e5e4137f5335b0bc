"""The page about a sweep: what it says, what it holds, and how it behaves in a browser."""

import base64
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from chromium import Page, find_browser
from test_report import TOKENS, made_row, made_sweep

from specter_sim.hardware import find_machine
from specter_sim.report import row_table
from specter_sim.report.answer import (
    answer,
    configuration_text,
    question_of,
    speculation_from_rows,
    speculation_text,
    usability,
)
from specter_sim.report.html import NEVER_VALIDATED, page, write_report
from specter_sim.report.markup import Html, element, join
from specter_sim.report.pareto_svg import linear_scale, log_scale, tick_text
from specter_sim.report.plots import pareto
from specter_sim.report.row_table import Column, columns_of, embedded_rows
from specter_sim.report.rows import Row, reads_future
from specter_sim.report.sensitivity import sensitivities, summary
from specter_sim.report.study import Speculation, Study, evenly
from specter_sim.report.tables import METRIC_COLUMNS
from specter_sim.report.time_bars import best_of_systems, parts_s
from specter_sim.report.validation import ValidatedPoint, differences, nearest, parse_points
from specter_sim.units import format_time
from specter_traces.errors import UsageError

PAYS = Speculation(True, 1.5, "speculation pays: x1.50 against no draft at equal memory")
HOSTILE = '</script><img src=x onerror="window.hacked=1"><script>window.hacked=1</script>"\'&\ud800'
VOID = {"meta", "input"}


def made_study(rows: Sequence[Row] | None = None, **changes: Any) -> Study:
    """A study of made rows, each with an identity."""
    found = [{**row, "key": f"{at:016x}"} for at, row in enumerate(rows or made_sweep())]
    told = {"date": "2026-11-30", "version": "1.2.3", "speculation": PAYS}
    return Study(**{"rows": found, **told, **changes})


class Parsed(HTMLParser):
    """Elements with their attributes and texts; `unbalanced` says what was not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, list[str]] = {}
        self.unbalanced: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        self.unbalanced += self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.unbalanced.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)

    def named(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def with_id(self, name: str) -> dict[str, str]:
        return next(found for _, found in self.elements if found.get("id") == name)

    def all_text(self) -> str:
        shown = (texts for tag, texts in self.texts.items() if tag not in ("script", "style"))
        return " ".join(text for texts in shown for text in texts)


# Markup


def test_text_is_escaped_and_html_is_not() -> None:
    made = element("p", "<b>", element("i", "&"), title='"<', hidden=True, id=None)
    assert made == '<p title="&quot;&lt;" hidden>&lt;b&gt;<i>&amp;</i></p>'
    assert join(["<", Html("<br>")]) == "&lt;<br>"
    assert element("meta", data_row=1) == '<meta data-row="1">'


def test_half_a_surrogate_pair_can_be_written() -> None:
    assert element("p", "a\ud800b").encode() == b"<p>a?b</p>"


# The answer


def test_the_answer_states_the_best_row() -> None:
    study = made_study()
    best = min(study.real, key=lambda row: row["tpot_s"])
    told = answer(study)
    assert told.startswith(
        f"{METRIC_COLUMNS['TPOT'](best)} a token ({best['tokens_per_s']:.1f} tokens/s)"
    )
    assert f"best of {len(study.real)} configurations" in told
    assert configuration_text(best) in told
    assert f"{best['slots_per_layer']:g} slots a MoE layer" in told
    assert "with link bandwidth 64.0 GB/s" in told
    assert "speculation pays (x1.50 against no draft at equal memory)" in told


def test_neither_bounds_nor_what_does_not_fit_are_the_answer() -> None:
    bound = made_row(slots=47, eviction="belady", link=64e9)
    large = made_row(slots=48, depth=8, link=64e9, gpu_memory_bytes=1000)
    usual = made_row(slots=8)
    study = made_study([bound, large, usual])
    assert study.best is not None and study.best["key"] == f"{2:016x}"
    assert "best of 1 configurations" in answer(study)
    nothing = made_study([bound, large])
    assert answer(nothing).startswith("No configuration can be used: of 2 results")
    assert "No configuration can be used" in page(nothing)


def test_configurations_in_words() -> None:
    assert configuration_text(made_row(slots=12, depth=4)) == (
        "plain experts, lru eviction, no prefetch, drafting 4 tokens ahead, "
        "12 slots a MoE layer (46.2 MB of device memory)"
    )
    assert "drafting 1 token ahead" in configuration_text(made_row(depth=1))
    assert "without drafting" in configuration_text(made_row())
    governed = made_row() | {"policy.depth": "governor", "preset": "specter"}
    assert configuration_text(governed).startswith("the preset specter: plain experts")
    assert "as deep as the governor allows" in configuration_text(governed)


@pytest.mark.parametrize(
    ("tokens_per_s", "says"),
    [
        (52.0, "usable at this speed, x10 the pace"),
        (5.3, "usable at this speed"),
        (5.1, "slower than people read"),
        (1.1, "slower than people read"),
        (0.9, "not usable in a conversation"),
    ],
)
def test_usability(tokens_per_s: float, says: str) -> None:
    assert says in usability(1 / tokens_per_s)


def test_the_verdict_as_a_clause() -> None:
    assert speculation_text(Speculation(False, 0.5, "")) == (
        "speculation does not pay (x2.00 slower than no draft at equal memory)"
    )
    assert speculation_text(Speculation(None, None, "")) == "whether speculation pays is not known"


def test_the_verdict_from_the_rows() -> None:
    equal: dict[str, Any] = {"device_bytes": 50_000_000}
    best = made_row(12, depth=2, tpot_s=1e-3, **equal)
    without = made_row(16, tpot_s=4e-3, **equal)
    larger = made_row(40, tpot_s=2e-3, device_bytes=50_000_001)
    elsewhere = made_row(16, link=64e9, tpot_s=1.5e-3, **equal)
    slower = made_row(8, tpot_s=5e-3, **equal)
    found = speculation_from_rows([larger, slower, best, without, elsewhere])
    assert found is not None and found.pays
    assert found.speedup == pytest.approx(4.0)
    assert speculation_from_rows([larger, best, elsewhere]) is None
    assert speculation_from_rows([slower, without]) is None


def test_the_question() -> None:
    assert question_of(made_study(question="Is it <fast>?")) == "Is it <fast>?"
    assert "<h1>Is it &lt;fast&gt;?</h1>" in page(made_study(question="Is it <fast>?"))
    assert "decodes tiny-moe fastest on emulated-cpu" in question_of(made_study())


# The page


def test_the_page_is_well_formed_and_complete() -> None:
    study = made_study(failures=["no room"], remarks=["The sweep has not finished."])
    parsed = Parsed(page(study))
    assert parsed.unbalanced == []
    for section in ("pareto", "configurations", "time", "sensitivity", "validation"):
        assert parsed.with_id(section)
    text = parsed.all_text()
    assert answer(study) in text and PAYS.text in text and NEVER_VALIDATED in text
    assert "1 could not run, the first because no room" in text
    assert "The sweep has not finished." in text
    assert "specter-sim 1.2.3" in text and "2026-11-30" in text
    assert "time per output token" in text


def test_the_page_needs_nothing_else() -> None:
    text = page(made_study())
    parsed = Parsed(text)
    names = {name for _, attributes in parsed.elements for name in attributes}
    assert not names & {"src", "srcset", "style", "action", "poster", "data", "onclick", "onload"}
    assert {name for name, _ in parsed.elements}.isdisjoint({"link", "iframe", "object", "base"})
    links = [found["href"] for _, found in parsed.elements if "href" in found]
    targets = {found["id"] for _, found in parsed.elements if "id" in found}
    assert links and all(link[0] == "#" and link[1:] in targets for link in links)
    code = "".join(parsed.texts["style"] + parsed.texts["script"])
    assert not re.search(r"url\(|@import|https?:|fetch\(|XMLHttp|innerHTML|eval\(", code)


def test_only_the_inline_style_and_script_may_run() -> None:
    text = page(made_study())
    policy = next(found["content"] for found in Parsed(text).named("meta") if "http-equiv" in found)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and rules["form-action"] == "'none'"
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        inside = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert inside is not None
        digest = base64.b64encode(hashlib.sha256(inside[1].encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"


def hostile_study() -> Study:
    names = {
        "machine.name": HOSTILE,
        "model": HOSTILE,
        "trace_name": HOSTILE,
        "policy.eviction": HOSTILE,
        "policy.prefetch": HOSTILE,
        "notes": HOSTILE,
        "preset": HOSTILE,
    }
    rows = [made_row(slots, depth) | names for slots in (8, 12) for depth in (0, 2)]
    rows += [row | {"model": "plain-name", "preset": None} for row in rows]
    verdict = Speculation(None, None, HOSTILE)
    return made_study(
        rows, question=HOSTILE, failures=[HOSTILE], remarks=[HOSTILE], speculation=verdict
    )


def test_hostile_names_stay_text() -> None:
    text = page(hostile_study())
    assert "<img" not in text and text.count("<script") == 2 == text.count("</script>")
    text.encode()
    parsed = Parsed(text)
    assert parsed.unbalanced == []
    assert {name for _, found in parsed.elements for name in found}.isdisjoint({"onerror"})
    assert HOSTILE.replace("\ud800", "?") in parsed.texts["h1"]


def test_a_study_without_any_tpot() -> None:
    study = made_study([made_row(tpot_s=None)])
    text = Parsed(page(study)).all_text()
    assert "1 results have no TPOT" in text and "No configuration can be used" in text


def test_the_best_of_each_place() -> None:
    study = made_study()
    text = page(study)
    assert "The best of each of 3 places:" in text
    for link, title in ((4e9, "4.00 GB/s"), (16e9, "16.0 GB/s"), (64e9, "64.0 GB/s")):
        here = [row for row in study.real if row["machine.link_bandwidth"] == link]
        best = format_time(min(row["tpot_s"] for row in here))
        assert f'<td>link bandwidth {title}</td><td class="number">{best}</td>' in text


def test_the_page_is_written(tmp_path: Path) -> None:
    study = made_study([made_row()])
    path = write_report(study, tmp_path / "deep" / "page.html")
    assert path.read_text() == page(study)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        write_report(study, tmp_path / "file" / "page.html")


# The table


def test_the_embedded_table_says_what_the_rows_say() -> None:
    study = made_study()
    ranked = sorted(study.shown, key=lambda row: row["tpot_s"])
    columns = embedded(page(study))
    names = [column["name"] for column in columns]
    assert names[:5] == ["TPOT", "link bandwidth", "slots", "policy", "depth"]
    for name, cell in METRIC_COLUMNS.items():
        column = columns[names.index(name)]
        assert shown_texts(column) == [cell(row) for row in ranked]
    slots = columns[names.index("slots")]
    assert slots["texts"] == ["8", "12", "16", "24", "32"]
    bandwidth = columns[names.index("link bandwidth")]
    assert bandwidth["texts"] == ["4.00 GB/s", "16.0 GB/s", "64.0 GB/s"]


def embedded(text: str) -> list[dict[str, Any]]:
    source = re.search(r'id="rows-data">(.*?)</script>', text, re.DOTALL)
    assert source is not None
    columns: list[dict[str, Any]] = json.loads(source[1])["columns"]
    return columns


def shown_texts(column: dict[str, Any]) -> list[str]:
    return ["-" if at < 0 else column["texts"][at] for at in column["cells"]]


def column_named(columns: Sequence[Column], name: str) -> Column:
    return next(column for column in columns if column.name == name)


def test_texts_are_ordered_by_value_and_absent_ones_stand_apart() -> None:
    rows = [
        made_row(8, tpot_s=0.9e-3, distance_to_bound=None),
        made_row(12, tpot_s=1.1e-3, distance_to_bound=10.0),
        made_row(16, tpot_s=1.0, distance_to_bound=9.0),
    ]
    columns = columns_of(rows, ["memory.slots"], [])
    assert column_named(columns, "TPOT").texts == ("900 us", "1.10 ms", "1.00 s")
    bound = column_named(columns, "x bound")
    assert bound.texts == ("9.00", "10.00") and bound.cells == (-1, 1, 0)
    assert bound.text(0) == "-" and bound.numeric
    assert column_named(columns, "slots").choices and not bound.choices


def test_a_preset_does_not_hide_what_varies_beside_it() -> None:
    rows = [made_row(eviction=rule) | {"preset": "specter"} for rule in ("lru", "lfu")]
    keys = ["preset", "policy.eviction"]
    assert column_named(columns_of(rows, keys, []), "eviction").texts == ("lfu", "lru")
    one_each = [rows[0], rows[1] | {"preset": "other"}]
    assert "eviction" not in [column.name for column in columns_of(one_each, keys, [])]


def test_a_large_sweep_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_table, "MOST_BEST", 20)
    monkeypatch.setattr(row_table, "MOST_SAMPLED", 10)
    study = made_study()
    kept = embedded_rows(study.places)
    ranked = sorted(study.shown, key=lambda row: row["tpot_s"])
    assert kept[:20] == ranked[:20] and len(kept) < len(ranked)
    assert kept == sorted(kept, key=lambda row: row["tpot_s"])
    assert ranked[-1] in kept  # the sample reaches the slow end
    for _, group in study.places:
        assert all(row in kept for row in pareto(group))
    text = page(study)
    assert f"{len(kept)} of {len(ranked)} configurations that fit" in text
    assert len(embedded(text)[0]["cells"]) == len(kept)


# Figures


def test_every_row_is_a_mark_and_the_front_can_be_reached_by_key() -> None:
    study = made_study()
    marks = [
        found for found in Parsed(page(study)).named("use") if "mark" in found.get("class", "")
    ]
    fronts = sum(len(pareto(group)) for _, group in study.places)
    assert len(marks) == len(study.shown)
    assert sum("tabindex" in mark for mark in marks) == fronts
    lowest = max(marks, key=lambda mark: float(mark["y"]))
    fastest = min(study.shown, key=lambda row: row["tpot_s"])
    assert METRIC_COLUMNS["TPOT"](fastest) in page(study)
    assert 0 < float(lowest["y"]) < 270


def test_scales_hold_their_values_and_have_ticks() -> None:
    for values in ([5.0, 5.0], [0.0, 3e9], [4e6, 9e6]):
        scale = linear_scale(values, 50, 350)
        assert all(50 <= scale.position(value) <= 350 for value in [*values, *scale.ticks])
        assert 2 <= len(scale.ticks) <= 10
    for times in ([5e-3, 5e-3], [5e-3, 6e-3], [1e-6, 1e3]):
        scale = log_scale(times, 230, 8)
        assert all(8 <= scale.position(time) <= 230 for time in [*times, *scale.ticks])
        assert 2 <= len(scale.ticks) <= 10
    assert [tick_text(text) for text in ("50.0 ms", "1.50 GB", "2.00 s", "200 MB")] == [
        "50 ms",
        "1.5 GB",
        "2 s",
        "200 MB",
    ]


def test_bars_add_up_to_decoding() -> None:
    row = made_row(8, depth=4, link=1e9)
    assert sum(parts_s(row)) == pytest.approx(row["decode_s"] / TOKENS)
    rows = made_sweep()
    best = best_of_systems(rows, ["policy.eviction"], most_bytes=50e6)
    assert [row["tpot_s"] for row in best] == sorted(row["tpot_s"] for row in best)
    for bar in best:
        same = [
            other
            for other in rows
            if other["policy.eviction"] == bar["policy.eviction"] and other["device_bytes"] <= 50e6
        ]
        assert bar["tpot_s"] == min(other["tpot_s"] for other in same)
    assert len(best) == 3


def test_bars_are_as_long_as_their_times() -> None:
    study = made_study([made_row(12, depth=2), made_row(12, eviction="lfu")])
    bars = [found for found in Parsed(page(study)).named("rect") if "part-" in found["class"]]
    widths = [sum(float(bar["width"]) for bar in bars[at : at + 6]) for at in (0, 6)]
    totals = sorted(sum(parts_s(row)) for row in study.shown)
    assert sorted(widths) == pytest.approx([1000 * total / totals[1] for total in totals], abs=0.5)


# Sensitivity


def test_best_and_median_of_every_value() -> None:
    times = {(8, 4e9): 8.0, (8, 16e9): 4.0, (12, 4e9): 6.0, (12, 16e9): 1.0}
    rows = [made_row(slots, link=link, tpot_s=time) for (slots, link), time in times.items()]
    rows.append(made_row(12, link=4e9, tpot_s=9.0))
    by_name = {effect.name: effect for effect in sensitivities(rows)}
    assert set(by_name) == {"slots", "link bandwidth"}
    slots, link = by_name["slots"], by_name["link bandwidth"]
    assert [(v.text, v.best_s, v.median_s, v.count) for v in slots.values] == [
        ("8", 4.0, 6.0, 2),
        ("12", 1.0, 6.0, 3),
    ]
    assert [(v.text, v.best_s, v.median_s) for v in link.values] == [
        ("4.00 GB/s", 6.0, 8.0),
        ("16.0 GB/s", 1.0, 2.5),
    ]
    assert (slots.effect, slots.median_effect) == (4.0, 1.0)
    assert [effect.name for effect in sensitivities(rows)] == ["link bandwidth", "slots"]
    assert summary([link, slots]).startswith(
        "link bandwidth matters most: its worst value costs x6"
    )


def test_depth_is_one_axis_and_systems_another() -> None:
    rows = made_sweep()
    for row, form in zip(rows, itertools.cycle(("plain", "coded"))):
        row["experts.form"] = form
    effects = {effect.name: effect for effect in sensitivities(rows)}
    assert [value.text for value in effects["depth"].values] == ["0", "1", "2", "4", "8"]
    assert effects["system"].combined and len(effects["system"].values) == 6
    for row in rows:
        row["preset"] = row["experts.form"]
    assert "system" not in [effect.name for effect in sensitivities(rows)]


def test_the_axis_that_matters_most_is_one_that_can_be_set() -> None:
    # Only the right pair of rule and form is fast: the system decides, neither of them alone.
    rows = []
    for rule, form in itertools.product(("lru", "lfu"), ("plain", "coded")):
        time = 1.0 if (rule, form) in {("lru", "plain"), ("lfu", "coded")} else 5.0
        rows.append(made_row(eviction=rule, tpot_s=time) | {"experts.form": form})
    effects = sensitivities(rows)
    assert effects[0].name == "system" and effects[0].effect == 5.0
    assert summary(effects).startswith("form matters most: its worst value costs x1.00")


def test_what_no_system_has_is_left_out_of_sensitivity() -> None:
    study = made_study()
    assert any(reads_future(row) for row in study.shown)
    eviction = next(e for e in sensitivities(study.real) if e.name == "eviction")
    assert [value.text for value in eviction.values] == ["lfu", "lru"]
    assert "Nothing varies" in page(made_study([made_row()]))


def test_many_values_are_thinned_and_the_best_stays() -> None:
    rows = [made_row(slots, tpot_s=abs(slots - 21) + 1.0) for slots in range(6, 46)]
    effect = sensitivities(rows)[0]
    shown = effect.leading(12)
    assert 12 <= len(shown) <= 13 and "21" in [value.text for value in shown]
    assert "values between these are left out" in page(made_study(rows))
    assert evenly(range(10), 4) == [0, 3, 6, 9] and evenly([1, 2], 4) == [1, 2]


# Assumptions


def test_every_machine_number_is_shown_with_its_source() -> None:
    text = Parsed(page(made_study())).all_text()
    for dotted, source in find_machine("emulated-cpu").sources.items():
        assert dotted in text and source in text
    assert "4.00 GB/s, 16.0 GB/s, 64.0 GB/s set by this sweep; the machine says 100 MB/s" in text
    assert "Set by this sweep: link.bytes_per_s 4.00 GB/s, 16.0 GB/s, 64.0 GB/s." in text


def test_what_was_assumed_is_marked() -> None:
    rows = [made_row(8, synthetic=True, notes="a; b"), made_row(12, assumed_draft=True, notes="b")]
    text = Parsed(page(made_study(rows))).all_text()
    assert "1 of 2 rows: synthetic trace: generated from statistics" in text
    assert "1 of 2 rows: assumed draft" in text
    assert "a (1 of 2 rows)" in text and "b (2 of 2 rows)" in text
    assert "no draft is assumed" not in text
    plain = Parsed(page(made_study([made_row()]))).all_text()
    assert "All routes were recorded" in plain
    assert "greedy if the trace was decoded greedily" in plain


def test_a_machine_that_is_gone_is_named() -> None:
    rows = [made_row() | {"machine.name": "gone.toml"}]
    text = Parsed(page(made_study(rows))).all_text()
    assert "Its numbers and their sources cannot be shown: cannot read" in text


# Validation


def point_table(**changes: Any) -> dict[str, Any]:
    return {
        "name": "on demand",
        "date": "2026-11-01",
        "machine": "two cores",
        "source": "a stopwatch",
        "config": {"model": "tiny-moe", "memory.slots": 12},
        "metric": "tpot_s",
        "predicted": 6e-3,
        "measured": 5e-3,
        **changes,
    }


def test_the_nearest_point_and_what_differs() -> None:
    row = made_row(12, link=16e9)
    table = [
        point_table(),
        point_table(name="far", config={"model": "other"}),
        point_table(name="near", config={"memory.slots": 13}),
    ]
    exact, far, near = parse_points(json.dumps({"points": table}), "points.json")
    assert nearest([far, near], row) is near and nearest([far, near, exact], row) is exact
    assert nearest([], row) is None
    assert differences(near, row) == ["memory.slots"] and differences(exact, row) == []
    assert exact.error == pytest.approx(0.2)


def test_the_page_shows_the_nearest_point() -> None:
    point = ValidatedPoint(**point_table(config={"memory.slots": 13}))
    text = Parsed(page(made_study([made_row(12)], points=[point]))).all_text()
    assert "predicted as 6.00 ms and measured as 5.00 ms, 20.0% above the measurement" in text
    assert "a stopwatch" in text and "differs from it" in text
    assert NEVER_VALIDATED not in text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense", "is no validation file"),
        ('{"points": 3}', "is no validation file"),
        ('{"points": [3]}', "a point must be a table"),
        (json.dumps({"points": [point_table(extra=1)]}), 'unknown key "extra"'),
        (json.dumps({"points": [{"name": "a"}]}), "a point lacks date"),
        (json.dumps({"points": [point_table(measured=0)]}), "measured must be a number above 0"),
        (json.dumps({"points": [point_table(predicted="1")]}), "predicted must be a number"),
        (json.dumps({"points": [point_table(config=[])]}), "config must be a table"),
        (json.dumps({"points": [point_table(name=3)]}), "name must be a text"),
    ],
)
def test_a_wrong_validation_file_is_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        parse_points(text, "points.json")


# In a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A headless Chromium with an empty profile."""
    found = find_browser()
    if found is None:
        pytest.skip("no Chromium on this machine: the page is not tried in a browser")
    with Page(found, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def opened(browser: Page, study: Study, folder: Path) -> Page:
    browser.complaints.clear()
    browser.requests.clear()
    browser.resize(1280, 900)
    browser.open(write_report(study, folder / "page.html"))
    return browser


def column_shown(browser: Page, index: int) -> list[str]:
    found: list[str] = browser.evaluate(
        "Array.from(document.querySelectorAll('#rows tbody tr'))"
        f".map(line => line.children[{index}].textContent)"
    )
    return found


def test_sorting_by_every_column(browser: Page, tmp_path: Path) -> None:
    study = made_study()
    opened(browser, study, tmp_path)
    columns = embedded(page(study))
    for index, column in enumerate(columns):
        expected = sorted(range(len(column["cells"])), key=lambda row: column["cells"][row])
        click = f"document.querySelectorAll('#rows th button')[{index}].click()"
        texts = shown_texts(column)
        if column["name"] != "TPOT":  # it is sorted by TPOT already: a click turns it round
            browser.evaluate(click)
            assert column_shown(browser, index) == [texts[row] for row in expected[:25]]
        browser.evaluate(click)
        assert (
            column_shown(browser, index)
            == sorted(texts, key=lambda text: -column["texts"].index(text))[:25]
        )
        order = f"document.querySelectorAll('#rows th')[{index}].ariaSort"
        assert browser.evaluate(order) == "descending"
    assert browser.evaluate("document.querySelectorAll('#rows th[aria-sort]').length") == 1
    assert browser.complaints == []


def test_absent_values_stay_last(browser: Page, tmp_path: Path) -> None:
    rows = [made_row(slots, distance_to_bound=float(slots)) for slots in (8, 12, 16)]
    rows[1]["distance_to_bound"] = None
    opened(browser, made_study(rows), tmp_path)
    names = [column["name"] for column in embedded((tmp_path / "page.html").read_text())]
    at = names.index("x bound")
    for expected in (["8.00", "16.00", "-"], ["16.00", "8.00", "-"]):
        browser.evaluate(f"document.querySelectorAll('#rows th button')[{at}].click()")
        assert column_shown(browser, at) == expected


def test_sorting_from_the_keyboard(browser: Page, tmp_path: Path) -> None:
    opened(browser, made_study(), tmp_path)
    browser.evaluate("document.querySelectorAll('#rows th button')[1].focus()")
    browser.press("Tab", 9)
    browser.press("Enter", 13)
    assert column_shown(browser, 2) == ["8"] * 25
    browser.press("Enter", 13)
    assert column_shown(browser, 2) == ["32"] * 25


def test_filters_and_pages(browser: Page, tmp_path: Path) -> None:
    study = made_study()
    opened(browser, study, tmp_path)
    count = "document.getElementById('count').textContent"
    assert browser.evaluate(count) == f"1 to 25 of {len(study.shown)}"
    browser.evaluate("document.getElementById('next').click()")
    assert browser.evaluate(count) == f"26 to 50 of {len(study.shown)}"
    browser.evaluate("document.getElementById('previous').click()")
    assert browser.evaluate(count) == f"1 to 25 of {len(study.shown)}"
    assert browser.evaluate("document.getElementById('previous').disabled")
    type_text = "box => { box.value = 'LFU 64.0'; box.dispatchEvent(new Event('input')); }"
    browser.evaluate(f"({type_text})(document.getElementById('search'))")
    assert browser.evaluate(count) == "1 to 25 of 25"
    choose = "box => { box.selectedIndex = 1; box.dispatchEvent(new Event('change')); }"
    browser.evaluate(f"({choose})(document.querySelector('.filters select[data-column=\"2\"]'))")
    assert browser.evaluate(count) == "1 to 5 of 5"
    assert set(column_shown(browser, 2)) == {"8"}
    browser.evaluate("document.getElementById('clear').click()")
    assert browser.evaluate(count) == f"1 to 25 of {len(study.shown)}"
    assert browser.complaints == []


def test_a_mark_says_what_it_is(browser: Page, tmp_path: Path) -> None:
    opened(browser, made_study(), tmp_path)
    browser.evaluate("document.querySelector('.mark.on-front').focus()")
    told = browser.evaluate("document.getElementById('point').textContent")
    assert told == browser.evaluate("document.querySelector('.mark.on-front title').textContent")
    assert "slots a layer" in told


def test_hostile_names_do_nothing(browser: Page, tmp_path: Path) -> None:
    opened(browser, hostile_study(), tmp_path)
    assert browser.evaluate("typeof window.hacked") == "undefined"
    assert browser.evaluate("document.images.length") == 0
    assert browser.evaluate("document.querySelector('#rows tbody').textContent.includes('<img')")
    assert browser.complaints == []
    assert [url for url in browser.requests if not url.startswith("file:")] == []


def test_an_injected_script_would_not_run(browser: Page, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    broken = page(made_study()).replace("</main>", "<script>window.hacked=1</script></main>")
    path.write_text(broken)
    browser.open(path)
    assert browser.evaluate("typeof window.hacked") == "undefined"
    assert any("Content Security Policy" in complaint for complaint in browser.complaints)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_phone(browser: Page, tmp_path: Path, scheme: str) -> None:
    opened(browser, made_study(), tmp_path)
    browser.resize(390, 844, scheme)
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    wide = "document.querySelector('#configurations .scroll')"
    assert browser.evaluate(f"{wide}.scrollWidth > {wide}.clientWidth")
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")


def test_a_large_sweep_opens(browser: Page, tmp_path: Path) -> None:
    spread = itertools.product(range(8, 48), range(17), ("lru", "lfu", "belady"), (4e9, 16e9))
    study = made_study([made_row(*point) for point in spread])
    opened(browser, study, tmp_path)
    assert browser.evaluate("document.getElementById('count').textContent").startswith(
        "1 to 25 of 30"
    )
    assert (tmp_path / "page.html").stat().st_size < 2_000_000
    assert browser.complaints == []
