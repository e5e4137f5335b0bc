"""Policies of the user's own: real modules in the current folder, run like any other policy."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from specter_sim.cli.app import app, exit_code_of
from specter_sim.config import RunConfig, build, resolved
from specter_sim.results import Engine
from specter_sim.sweep import evaluate as evaluation
from specter_sim.sweep.evaluate import evaluate, evaluate_compiled, inputs_of
from specter_sim.sweep.executor import run_tasks
from specter_sim.sweep.plan import make_sweep, make_tasks
from specter_sim.sweep.pools import in_processes
from specter_sim.sweep.store import Store
from specter_traces.errors import SpecterError, UsageError

RULES = '''
"""Rules of one's own: an LRU under another name, and a greedy planner."""

from specter_sim.policies import Param
from specter_sim.policies.catalogue import EvictionInfo, PrefetchInfo
from specter_sim.policies.depth import DepthRule
from specter_sim.policies.plan import clear_plan, plan_top_predicted
from specter_sim.policies.prefetch import PrefetchRule


def mine(s, index):
    return s.last_access[index]


def drafted(s, m, step, seconds):
    if step == int(m[0]):
        clear_plan(s)
        plan_top_predicted(s, s.experts)


planner = PrefetchInfo(
    "planner", "plans once", params={"after": Param(2, "draft steps", 1)},
    rule=PrefetchRule(drafted=drafted), needs=frozenset({"paired"}),
)
bare_planner = PrefetchRule()
three = DepthRule(choose=lambda m, limit: min(3, limit))
too_deep = DepthRule(choose=lambda m, limit: limit + 1)
greedy = EvictionInfo("greedy", "reads the future", rule=mine, needs=frozenset({"future"}))
number = 3


def raising(s, index):
    return 1 / 0


def nothing(s, index):
    return None


def nan(s, index):
    return float("nan")
'''


@pytest.fixture(autouse=True)
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of rules in the current folder; its name is used by no other test."""
    name = f"rules_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(RULES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.syspath_prepend("/nowhere")  # forget what folders held
    return tmp_path / f"{name}.py"


def config(**policy: Any) -> RunConfig:
    return build({"trace": {"tokens": 24}, "memory": {"slots": 12}, "policy": policy})


def metrics(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("notes", "engine")}


def test_the_same_rule_under_your_own_name_gives_the_same_run(rules: Path) -> None:
    name = f"{rules.stem}:mine"
    own = evaluate(resolved(config(eviction=name)))
    lru = evaluate(resolved(config(eviction="lru")), Engine.SIMPY)
    assert metrics(own) == metrics(lru)
    assert own["engine"] == "simpy"
    assert f"run on the SimPy engine: {name} is plain Python of your own" in own["notes"]
    assert "SimPy" not in lru["notes"]


def test_prefetch_and_depth_of_your_own(rules: Path) -> None:
    own = config(prefetch=f"{rules.stem}:planner", depth=f"{rules.stem}:three")
    late = config(prefetch="draft-late", depth=3, prefetch_params={"share": 0.67})
    found = evaluate(resolved(own))
    assert found["mean_depth"] > 2 and found["prefetch_loads"] > 0
    assert metrics(found) == metrics(evaluate(resolved(late), Engine.SIMPY))
    after = {"prefetch_params": {"after": 1}}
    early = build(resolved(own), {"policy": {"prefetch": f"{rules.stem}:planner"} | after})
    assert metrics(evaluate(resolved(early))) != metrics(found)


def test_threads_leave_it_to_processes(rules: Path) -> None:
    with pytest.raises(evaluation.NeedsSimpyError, match="plain Python of your own"):
        evaluate_compiled(resolved(config(eviction=f"{rules.stem}:mine")))


def test_worker_processes_import_it_too(rules: Path, tmp_path: Path) -> None:
    table = {"trace": {"tokens": 16}, "policy": {"eviction": f"{rules.stem}:mine"}}
    sweep = make_sweep(table | {"axes": {"memory.slots": [8, 12, 16]}}, (), ())
    with Store(tmp_path / "out") as store:
        compute = in_processes(evaluate, 2)
        outcome = run_tasks(make_tasks(sweep, inputs_of, "1"), compute, store)
    assert (outcome.computed, outcome.failed) == (3, 0), outcome.first_error


def test_the_identity_follows_the_file(rules: Path) -> None:
    own = config(eviction=f"{rules.stem}:mine")
    before = inputs_of(own)
    assert inputs_of(own) == before
    rules.write_text(RULES + "\n# another rule\n")
    assert inputs_of(own) != before


@pytest.mark.parametrize(
    ("kind", "attribute", "says"),
    [
        ("eviction", "absent", "has no absent"),
        ("eviction", "number", "must be a function (state, index) -> number or an EvictionInfo"),
        ("eviction", "planner", "an EvictionInfo, got PrefetchInfo"),
        ("eviction", "greedy", "needs future: an own policy can only be given gate, paired"),
        ("prefetch", "mine", "must be a PrefetchRule or a PrefetchInfo, got function"),
        ("depth", "bare_planner", "must be a DepthRule or a DepthInfo, got PrefetchRule"),
        ("eviction", "not a name", "names no policy: write your own like my_module:my_rule"),
        ("eviction", "", "names no policy"),
    ],
)
def test_what_is_no_policy_is_refused(rules: Path, kind: str, attribute: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        evaluate(resolved(config(**{kind: f"{rules.stem}:{attribute}"})))
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot import absent_rules (ModuleNotFoundError: No module named 'absent_rules')"),
        ("def broken(:\n", "cannot import {} (SyntaxError"),
        ("raise ValueError('no\\nluck')\n", "cannot import {} (ValueError: no)"),
        ("import sys; sys.exit(3)\n", "cannot import {} (SystemExit: 3)"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(
    rules: Path, text: str | None, says: str
) -> None:
    name = "absent_rules"
    if text is not None:
        name = f"broken_{rules.stem}"
        (rules.parent / f"{name}.py").write_text(text)
    with pytest.raises(UsageError) as caught:
        evaluate(resolved(config(eviction=f"{name}:rule")))
    assert says.format(name) in str(caught.value) and "\n" not in str(caught.value)
    assert str(rules.parent) in str(caught.value)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ({"eviction": "raising"}, "failed: ZeroDivisionError: division by zero ({} line 33)"),
        ({"eviction": "nothing"}, "failed: TypeError: float() argument"),
        ({"eviction": "nan"}, "returned nan"),
        ({"depth": "too_deep"}, "possible"),
    ],
)
def test_a_rule_that_fails_is_one_line(rules: Path, policy: dict[str, str], says: str) -> None:
    chosen = {kind: f"{rules.stem}:{attribute}" for kind, attribute in policy.items()}
    with pytest.raises(SpecterError) as caught:
        evaluate(resolved(config(**chosen)))
    assert says.format(rules.name) in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code == 1


def test_the_command_line_takes_it(rules: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["run", "--tokens", "16", "--slots", "12", "--json"]
    own = ["--set", f"policy.eviction={rules.stem}:mine"]
    assert exit_code_of(lambda: app(call + own, standalone_mode=False)) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["engine"] == "simpy" and "slower" in result["notes"]


def test_a_file_here_never_hides_an_installed_module(rules: Path) -> None:
    (rules.parent / "sndhdr.py").write_text("raise ValueError('hidden')\n")
    evaluate(resolved(config(eviction=f"{rules.stem}:mine")))
    found = importlib.util.find_spec("sndhdr")
    assert found is not None and found.origin != str(rules.parent / "sndhdr.py")
