"""Sweeps: axes, filters, the record on disk, and that no kill loses or doubles a row."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specter_sim.config import RunConfig, Table, flatten, resolved
from specter_sim.sweep.axes import read_axes
from specter_sim.sweep.evaluate import NeedsSimpyError
from specter_sim.sweep.executor import Evaluate, Outcome, estimate, run_tasks
from specter_sim.sweep.filters import Filter
from specter_sim.sweep.plan import Task, make_sweep, make_tasks
from specter_sim.sweep.pools import in_processes, in_threads, one_by_one
from specter_sim.sweep.store import RECORDS, Record, Store
from specter_sim.sweep.tables import json_document, read_rows, write_tables
from specter_traces.errors import SpecterError, UsageError


def square(config: Table) -> dict[str, Any]:
    """A real but cheap stand-in for the simulator."""
    slots = config["memory"]["slots"]
    if slots == 13:
        raise UsageError("13 slots are unlucky: take 12")
    return {"tpot_s": 1.0 / slots**2, "ttft_s": float("nan"), "notes": ["a", "b"], "hit_rate": 0.5}


def slow_square(config: Table) -> dict[str, Any]:
    time.sleep(0.05)
    return square(config)


def no_inputs(config: RunConfig) -> str:
    return "inputs"


def plan(slots: list[int], version: str = "1") -> list[Task]:
    sweep = make_sweep({"axes": {"memory.slots": slots}}, (), ())
    return list(make_tasks(sweep, no_inputs, version))


def computed(
    slots: list[int],
    store: Store,
    evaluate: Evaluate = square,
    workers: int = 1,
    version: str = "1",
) -> Outcome:
    """A sweep over some slots, in processes where there are several workers."""
    return run_tasks(plan(slots, version), in_processes(evaluate, workers), store)


def records_of(outcome: Outcome, store: Store) -> list[Record]:
    return list(store.records(outcome.keys))


# Axes


def values_of(key: str, spec: Any) -> list[Any]:
    return [point[key] for point in read_axes({key: spec}).points()]


def test_ranges() -> None:
    assert values_of("memory.slots", {"linspace": [4, 16, 4]}) == [4, 8, 12, 16]
    assert values_of("memory.slots", {"logspace": [2, 32, 5]}) == [2, 4, 8, 16, 32]
    assert values_of("memory.slots", {"geom": [3, 2, 4]}) == [3, 6, 12, 24]
    rates = values_of("machine.link_bandwidth", {"logspace": ["1 GB/s", "100 GB/s", 3]})
    assert rates == pytest.approx([1e9, 1e10, 1e11])


def test_whole_number_axes_are_rounded_and_lose_doubles() -> None:
    assert values_of("memory.slots", {"linspace": [1, 3, 5]}) == [1, 2, 3]
    assert values_of("trace.assumed_recall", {"linspace": [0.7, 0.8, 2]}) == [0.7, 0.8]


def test_axes_cross_and_zip_groups_go_together() -> None:
    axes = read_axes(
        {
            "memory": {"slots": [8, 12]},
            "zip": [{"policy.depth": ["never", "fixed"], "policy.prefetch": ["none", "draft"]}],
        }
    )
    assert axes.keys == ("memory.slots", "policy.depth", "policy.prefetch")
    assert [tuple(point.values()) for point in axes.points()] == [
        (8, "never", "none"),
        (8, "fixed", "draft"),
        (12, "never", "none"),
        (12, "fixed", "draft"),
    ]


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"memory.slots": []}, "axis memory.slots has no values"),
        ({"memory.slot": [1]}, 'unknown key "memory.slot": did you mean "memory.slots"?'),
        ({"memory.slots": 8}, "must be a list or a range, got 8: write [8]"),
        ({"memory.slots": {"linspace": [1, 2]}}, "linspace takes three numbers"),
        ({"memory.slots": {"linspace": [1, 2, 0]}}, "whole number of values, got 0"),
        ({"memory.slots": {"logspace": [0, 2, 3]}}, "above zero"),
        ({"machine.link_bandwidth": {"linspace": ["a", "b", 2]}}, "is not a quantity"),
        ({"zip": [{"memory.slots": [1, 2], "model": ["a"]}]}, "memory.slots has 2, model has 1"),
        ({"zip": [{}]}, "zip]] group is empty"),
        ({"memory.slots": [1], "zip": [{"memory.slots": [2]}]}, "on two axes"),
        ({"zip": {"model": ["a"]}}, "array of tables"),
        ({"memory.slots": [1], "filters": "memory.slots >"}, "is not a condition"),
    ],
)
def test_a_wrong_axis_is_named(table: Table, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_axes(table)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


# Filters


VALUES = {
    "memory.slots": 8,
    "memory.budget": None,
    "machine.link_bandwidth": 25e9,
    "policy.depth": "never",
    "policy.depth_params.depth": 4,
    "model": "tiny-moe",
}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("memory.slots >= 8 and policy.depth == 'never'", True),
        ("memory.slots * 2 - 1 > 15 or model != 'tiny-moe'", False),
        ("4 < memory.slots <= 8", True),
        ("not memory.slots in [8, 12]", False),
        ("machine.link_bandwidth >= '16 GB/s'", True),
        ("machine.link_bandwidth >= '32 GB/s'", False),
        ("memory.budget >= 1", False),
        ("memory.budget == None", True),
        ("policy.depth_params.depth % 3 == 1", True),
        ("policy.depth_params.absent == None", True),
        ("-memory.slots < 0", True),
    ],
)
def test_filters(text: str, holds: bool) -> None:
    assert Filter(text).accepts(VALUES) is holds


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "model.upper() == 'X'",
        "[x for x in model]",
        "(lambda: 1)()",
        "memory.slots ** 9",
        "'a' * 1000000",
        "memory.slots if model else 3",
        "memory.slots[0]",
        "model + 1",
        "model < 3",
        "memory.slots / 0",
        "memory.slot > 3",
        "1 is 1",
    ],
)
def test_filters_refuse_everything_else(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Filter(text).accepts(VALUES)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=30))
def test_a_filter_never_fails_in_another_way(text: str) -> None:
    with contextlib.suppress(UsageError):
        Filter(text).accepts(VALUES)


# Plans


def test_filters_choose_and_equal_configurations_are_computed_once() -> None:
    table = {"axes": {"memory.slots": [4, 8, 8, 12], "filters": ["memory.slots <= 8"]}}
    found = make_sweep(table, (), ()).configurations()
    assert [config.memory.slots for config in found] == [4, 8]


def test_axes_that_expand_to_nothing_are_an_error() -> None:
    table = {"axes": {"memory.slots": [4, 8], "filters": "memory.slots > 8"}}
    with pytest.raises(UsageError, match="expand to nothing: none of 2 combinations"):
        list(make_sweep(table, (), ()).configurations())
    with pytest.raises(UsageError, match="has no axes"):
        make_sweep({"model": "tiny-moe"}, (), ())


def test_settings_replace_axes_and_axes_can_be_given_anew() -> None:
    table = {"trace": {"tokens": 64}, "axes": {"memory.slots": [4, 8]}}
    sweep = make_sweep(
        table, ["memory.slots=6", "trace.tokens=32"], ["policy.eviction=['lru','fifo']"]
    )
    found = sweep.configurations()
    assert [(c.memory.slots, c.trace.tokens, c.policy.eviction) for c in found] == [
        (6, 32, "lru"),
        (6, 32, "fifo"),
    ]


def test_a_wrong_key_of_the_base_is_reported() -> None:
    with pytest.raises(UsageError, match="unknown key"):
        make_sweep({"trace": {"token": 3}, "axes": {"memory.slots": [1]}}, (), ())


# The record on disk


def test_results_are_kept_and_only_what_is_missing_is_computed(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        first = computed([2, 4], store)
        before = records_of(first, store)
    with Store(tmp_path) as store:
        second = computed([2, 4, 8], store)
        after = records_of(second, store)
    assert (first.computed, first.reused) == (2, 0)
    assert (second.computed, second.reused) == (1, 2)
    assert [record["config"]["memory"]["slots"] for record in after] == [2, 4, 8]
    assert after[:2] == before
    assert len((tmp_path / RECORDS).read_text().splitlines()) == 3


def test_another_version_or_other_inputs_are_computed_again(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        computed([2], store)
        assert computed([2], store, version="2").reused == 0


def test_a_failing_configuration_does_not_stop_the_others_and_is_tried_again(
    tmp_path: Path,
) -> None:
    with Store(tmp_path) as store:
        outcome = computed([12, 13, 14], store)
    assert outcome.first_error == "13 slots are unlucky: take 12"
    assert (outcome.failed, outcome.has_results) == (1, True)
    with Store(tmp_path) as store:
        assert computed([12, 13, 14], store).computed == 1


def test_nothing_but_failures_is_no_result(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        assert not computed([13], store).has_results


def test_an_error_never_hides_a_result(tmp_path: Path) -> None:
    (task,) = plan([2])
    with Store(tmp_path) as store:
        run_tasks([task], one_by_one(square), store)
        store.append({"key": task.key, "config": {}, "error": "later"})
        assert store.has_result(task.key)
    with Store(tmp_path) as store:
        (record,) = store.records([task.key])
    assert record["result"]["tpot_s"] == 0.25


@given(cut=st.integers(min_value=1, max_value=40))
def test_a_torn_last_line_is_cut_off(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("torn")
    with Store(folder) as store:
        computed([2, 4], store)
    content = (folder / RECORDS).read_bytes()
    (folder / RECORDS).write_bytes(content[:-cut])
    with Store(folder) as store:
        outcome = computed([2, 4], store)
        slots = [record["config"]["memory"]["slots"] for record in records_of(outcome, store)]
    assert (outcome.computed, outcome.reused) == (1, 1)
    assert slots == [2, 4]
    lines = (folder / RECORDS).read_text().splitlines()
    assert len({json.loads(line)["key"] for line in lines}) == len(lines) == 2


def test_a_foreign_file_is_refused_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / RECORDS).write_text('{"mine": 1}\n')
    with pytest.raises(UsageError, match="line 1 is not a result: move the file away"):
        Store(tmp_path)
    assert (tmp_path / RECORDS).read_text() == '{"mine": 1}\n'


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write to .*--out") as caught:
        Store(tmp_path / "file" / "folder")
    assert "\n" not in str(caught.value)


def test_two_sweeps_cannot_write_to_one_folder(tmp_path: Path) -> None:
    with Store(tmp_path), pytest.raises(UsageError, match="another sweep is writing"):
        Store(tmp_path)
    Store(tmp_path).__exit__(None, None, None)


def write(tmp_path: Path, slots: list[int]) -> list[Record]:
    """Compute and write the tables; the records."""
    with Store(tmp_path) as store:
        outcome = computed(slots, store)
        write_tables(store, outcome.keys, read_rows(store, outcome.keys), {"version": "1"})
        return records_of(outcome, store)


def test_tables_carry_the_resolved_configuration_in_every_row(tmp_path: Path) -> None:
    import csv

    records = write(tmp_path, [2, 4])
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    for row, task in zip(rows, plan([2, 4]), strict=True):
        assert set(flatten(resolved(task.config))) <= set(row)
        assert float(row["tpot_s"]) == 1.0 / int(row["memory.slots"]) ** 2
        assert row["ttft_s"] == ""
        assert json.loads(row["notes"]) == ["a", "b"]
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["version"] == "1"
    assert document["results"] == records


def test_a_failure_has_a_row_with_its_reason(tmp_path: Path) -> None:
    import csv

    write(tmp_path, [12, 13])
    good, bad = csv.DictReader((tmp_path / "results.csv").open())
    assert (good["error"], bad["error"]) == ("", "13 slots are unlucky: take 12")
    assert (bad["tpot_s"], bad["memory.slots"]) == ("", "13")


def test_documents_are_json_whatever_they_hold() -> None:
    abouts: list[dict[str, Any]] = [{}, {"a": [1, {"b": None}]}]
    for about in abouts:
        for lines in ([], ['{"k": 1}'], ['{"k": 1}', '{"k": "ü"}']):
            document = json.loads("".join(json_document(about, lines)))
            assert document == about | {"results": [json.loads(line) for line in lines]}


def test_parquet_holds_the_same_rows(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    write(tmp_path, [2, 4])
    table = parquet.read_table(tmp_path / "results.parquet").to_pydict()
    assert table["memory.slots"] == [2, 4]
    assert table["tpot_s"] == [0.25, 0.0625]


def told(folder: Path, evaluate: Evaluate, workers: int) -> list[Any]:
    with Store(folder) as store:
        outcome = computed([2, 4, 8, 13], store, evaluate, workers)
        records = records_of(outcome, store)
    return [(record["key"], record.get("result"), record.get("error")) for record in records]


def test_workers_give_what_one_process_gives(tmp_path: Path) -> None:
    assert told(tmp_path / "one", square, 1) == told(tmp_path / "two", square, 2)


def only_even(config: Table) -> dict[str, Any]:
    if config["memory"]["slots"] % 2:
        raise NeedsSimpyError("odd")
    return square(config)


def test_what_threads_cannot_compute_is_left_to_the_others(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        compute = in_threads(only_even, 2, one_by_one(slow_square))
        outcome = run_tasks(plan([2, 3, 4, 5, 13]), compute, store)
        slots = [record["config"]["memory"]["slots"] for record in records_of(outcome, store)]
    assert (outcome.computed, outcome.failed) == (5, 1)
    assert slots == [2, 3, 4, 5, 13]
    lines = [json.loads(line) for line in (tmp_path / RECORDS).read_text().splitlines()]
    assert {line["config"]["memory"]["slots"] for line in lines[2:]} == {3, 5, 13}


def test_tasks_are_made_when_they_are_needed(tmp_path: Path) -> None:
    made = 0

    def tasks() -> Iterator[Task]:
        nonlocal made
        for task in plan(list(range(20, 60))):
            made += 1
            yield task

    seen: list[tuple[int, int]] = []
    with Store(tmp_path) as store:
        compute = in_threads(square, 2, one_by_one(square))
        run_tasks(tasks(), compute, store, lambda done, total: seen.append((done, made)))
    assert [done for done, _ in seen] == list(range(1, 41))
    assert all(made <= done + 4 for done, made in seen)


def dying(config: Table) -> dict[str, Any]:
    os._exit(9)


def test_a_worker_that_dies_is_one_line(tmp_path: Path) -> None:
    with Store(tmp_path) as store, pytest.raises(SpecterError, match="worker process died"):
        computed([2, 4, 8], store, dying, workers=2)


def test_progress_counts_what_was_there(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    with Store(tmp_path) as store:
        computed([2], store)
        told = lambda *at: seen.append(at)  # noqa: E731
        run_tasks(plan([2, 4]), one_by_one(square), store, told, total=2)
    assert seen == [(2, 2)]


def test_the_estimate_is_of_the_right_size() -> None:
    found = estimate(plan(list(range(14, 34))), slow_square, workers=2)
    assert found.configurations == 20
    assert 0.5 < found.seconds < 2.0


# Kills

SLOTS = list(range(20, 60))


def endless(config: Table) -> dict[str, Any]:
    if config["memory"]["slots"] > SLOTS[2]:
        time.sleep(60)
    return square(config)


KILLED_SWEEP = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from test_sweep import SLOTS, endless, plan, slow_square
from specter_sim.sweep.executor import run_tasks
from specter_sim.sweep.pools import in_processes, in_threads, one_by_one
from specter_sim.sweep.store import Store
if __name__ == "__main__":
    workers = int(sys.argv[2])
    with Store(Path(sys.argv[1])) as store:
        compute = in_processes({evaluate}, workers)
        if {threads}:
            compute = in_threads({evaluate}, workers, compute)
        run_tasks(plan(SLOTS[:{last}]), compute, store)
"""


def started_sweep(
    folder: Path,
    script: Path,
    workers: int,
    evaluate: str = "slow_square",
    last: int = 99,
    threads: bool = False,
) -> subprocess.Popen[str]:
    path = [str(Path(__file__).parent), *sys.path]
    script.write_text(KILLED_SWEEP.format(path=path, evaluate=evaluate, last=last, threads=threads))
    return subprocess.Popen(
        [sys.executable, str(script), str(folder), str(workers)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def assert_no_process_is_left(group: int) -> None:
    deadline = time.monotonic() + 10
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.02)
        pytest.fail("workers outlive their sweep")


def lines_of(folder: Path) -> list[str]:
    path = folder / RECORDS
    return path.read_text().splitlines() if path.exists() else []


def wait_for_lines(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(lines_of(folder)) < count and time.monotonic() < deadline:
        time.sleep(0.01)


def test_an_interrupt_does_not_wait_for_what_is_being_computed(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    sweep = started_sweep(folder, tmp_path / "sweep.py", 2, "endless")
    wait_for_lines(folder, 3)
    os.killpg(sweep.pid, signal.SIGINT)  # as a terminal does: the workers get it too
    sweep.communicate(timeout=20)
    assert sweep.returncode != 0
    assert_no_process_is_left(sweep.pid)


def ignores_interrupts(process: str) -> bool:
    told = Path(f"/proc/{process}/status").read_text()
    (mask,) = (line.split()[1] for line in told.splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask, 16) >> (signal.SIGINT - 1) & 1)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds children in /proc")
def test_workers_leave_ctrl_c_to_the_parent(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    sweep = started_sweep(folder, tmp_path / "sweep.py", 2, last=12)
    wait_for_lines(folder, 3)
    children = Path(f"/proc/{sweep.pid}/task/{sweep.pid}/children").read_text().split()
    while not all(map(ignores_interrupts, children)):  # one may still be starting
        time.sleep(0.01)
    for child in children:
        os.kill(int(child), signal.SIGINT)
    _, stderr = sweep.communicate(timeout=30)
    assert (sweep.returncode, stderr) == (0, "")
    assert len(lines_of(folder)) == 12


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("workers", "threads"), [(1, False), (2, False), (2, True)])
def test_a_killed_sweep_loses_and_doubles_nothing(
    tmp_path: Path, how: signal.Signals, workers: int, threads: bool
) -> None:
    folder = tmp_path / "out"
    sweep = started_sweep(folder, tmp_path / "sweep.py", workers, threads=threads)
    wait_for_lines(folder, 3)
    sweep.send_signal(how)
    sweep.communicate(timeout=20)
    assert sweep.returncode != 0
    before = lines_of(folder)
    assert 3 <= len(before) < len(SLOTS)
    assert_no_process_is_left(sweep.pid)
    with Store(folder) as store:
        outcome = run_tasks(plan(SLOTS), one_by_one(square), store)
    after = lines_of(folder)
    assert after[: len(before)] == before
    assert outcome.reused == len(before)
    keys = [json.loads(line)["key"] for line in after]
    assert sorted(keys) == sorted(task.key for task in plan(SLOTS))


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        ({"memory.slots": {"linspace": [1, 2, 10**12]}}, "at most 1,000,000 values"),
        ({"memory.slots": {"geom": [1, 2, int("9" * 400)]}}, "at most 1,000,000 values"),
        ({"memory.slots": {"geom": [1, 10, 400]}}, "leaves the numbers there are"),
        ({"memory.slots": {"geom": [1, 1e300, 3]}}, "leaves the numbers there are"),
        ({"memory.slots": {"logspace": [1e-300, 1e300, 3]}}, "leaves the numbers there are"),
        ({"memory.slots": int("9" * 400)}, "must be a list or a range"),
        ({"memory": [1, 2]}, '"memory" is a table: name one of its keys, like memory.slots'),
        ({"policy.depth_params": [1]}, '"policy.depth_params" is a table'),
        ({"memory.slots": [8], "filters": 3}, "axes.filters is a list of conditions, got 3"),
        ({"memory.slots": [8], "filters": [3]}, "a filter is a text"),
        (
            {"memory.slots": list(range(1, 1002)), "trace.seed": list(range(1000))},
            "the axes have 1,001,000 combinations, more than 1,000,000",
        ),
    ],
)
def test_endless_and_senseless_axes_are_refused(axes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        make_sweep({"axes": axes}, (), ())
    assert len(str(caught.value)) < 300


def test_an_empty_range_on_the_command_line_is_refused() -> None:
    with pytest.raises(UsageError, match="a range is one of"):
        make_sweep({}, (), ["memory.slots={}"])


@pytest.mark.parametrize("word", ["not ", "-"])
def test_a_filter_nested_too_deeply_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match=r"filter '.*\.\.\.: it is"):
        Filter(word * 1500 + "memory.slots").accepts({"memory.slots": 3})
