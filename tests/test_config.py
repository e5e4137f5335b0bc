"""Configurations: layers, unknown keys, one-line errors, identity."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specter_sim import config
from specter_sim.config import (
    RunConfig,
    build,
    check_key,
    content_hash,
    flatten,
    load_table,
    nest,
    parse_settings,
    resolved,
    to_toml,
)
from specter_traces.errors import UsageError


def refused(*layers: dict[str, object]) -> str:
    with pytest.raises(UsageError) as caught:
        build(*layers)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_quantities_are_read_in_human_units() -> None:
    run = build({"machine": {"link_bandwidth": "25 GB/s", "link_latency": "8 us"}})
    assert run.machine.link_bandwidth == 25e9
    assert run.machine.link_latency == pytest.approx(8e-6)
    assert build({"memory": {"budget": "24 GiB"}}).memory.budget == 24 * 2**30


def test_an_unknown_key_names_the_nearest() -> None:
    assert refused({"policy": {"evictoin": "lru"}}) == (
        'unknown key "policy.evictoin": did you mean "policy.eviction"?'
    )
    assert 'did you mean "memory.slots"?' in refused({"slots": 3})
    assert 'did you mean "machine"?' in refused({"machin": {}})


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        ({"memory": {"slots": 0}}, "memory.slots: should be greater than or equal to 1, got 0"),
        ({"memory": {"slots": -4}}, "got -4"),
        ({"memory": {"slots": 2.5}}, "memory.slots: should be a valid integer"),
        ({"memory": {"budget": "24 gb"}}, 'memory.budget: unknown unit "gb"'),
        ({"memory": {"layout": "heap"}}, "'per-layer' or 'global', got 'heap'"),
        ({"memory": {"slots": 2, "budget": 5}}, "slots and budget are both given"),
        ({"machine": {"link_bandwidth": 0}}, "should be greater than 0"),
        ({"experts": {"draft_bits": 5}}, "experts.draft_bits: should be 2, 3, 4 or 8, got 5"),
        ({"trace": "mine"}, "trace: should be a table, got 'mine'"),
        ({"trace": {"tokens": "many"}}, "trace.tokens"),
        ({"policy": {"depth_params": {"depth": [1]}}}, "policy.depth_params.depth"),
    ],
)
def test_a_bad_value_is_one_line(layer: dict[str, object], says: str) -> None:
    assert says in refused(layer)


def test_later_layers_win() -> None:
    run = build({"memory": {"slots": 8}, "trace": {"tokens": 32}}, {"memory": {"slots": 12}})
    assert (run.memory.slots, run.trace.tokens) == (12, 32)


def test_another_policy_drops_the_parameters_of_the_old_one() -> None:
    below = {"policy": {"depth": "fixed", "depth_params": {"depth": 4}}}
    assert build(below, {"policy": {"depth": "never"}}).policy.depth_params == {}
    assert build(below, {"policy": {"depth": "fixed"}}).policy.depth_params == {"depth": 4}
    added = build(below, {"policy": {"depth_params": {"start": 2}}})
    assert added.policy.depth_params == {"depth": 4, "start": 2}


def test_a_depth_may_be_a_number() -> None:
    by_number = build({"policy": {"depth": 4}})
    by_name = build({"policy": {"depth": "fixed", "depth_params": {"depth": 4}}})
    assert by_number == by_name == build({"policy": {"depth": "4"}})
    assert build({"policy": {"depth": 0}}).policy.depth == "never"
    lower = {"policy": {"depth": 8}}
    assert build(lower, {"policy": {"depth": 2}}).policy.depth_params == {"depth": 2}
    assert "policy.depth" in refused({"policy": {"depth": True}})


def test_a_later_budget_replaces_earlier_slots() -> None:
    run = build({"memory": {"slots": 8}}, {"memory": {"budget": "1 GB"}})
    assert (run.memory.slots, run.memory.budget) == (None, 10**9)


def test_none_is_written_as_a_word() -> None:
    assert build({"experts": {"draft_bits": "none"}}).experts.draft_bits is None
    assert "memory.layout" in refused({"memory": {"layout": "none"}})
    assert build({"policy": {"prefetch": "none"}}).policy.prefetch == "none"


def test_settings_read_toml_or_text() -> None:
    layer = parse_settings(
        [
            "memory.slots=12",
            "machine.link_bandwidth=25 GB/s",
            'model = "tiny-moe"',
            "policy.eviction=lfu",
        ]
    )
    run = build(layer)
    assert run.memory.slots == 12
    assert run.machine.link_bandwidth == 25e9
    assert run.policy.eviction == "lfu"
    for wrong in ("memory.slots", "=3"):
        with pytest.raises(UsageError, match="is not a setting"):
            parse_settings([wrong])
    with pytest.raises(UsageError, match="to be a table"):
        parse_settings(["model=a", "model.name=b"])


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("a = [1,\n")
    with pytest.raises(UsageError, match=r"broken\.toml is not valid TOML: Invalid value"):
        load_table(broken)
    with pytest.raises(UsageError, match=r"cannot read .*absent\.toml: No such file"):
        load_table(tmp_path / "absent.toml")


def test_check_key() -> None:
    check_key("memory.slots")
    check_key("policy.depth_params.anything")
    check_key("preset")
    for wrong in ("memory.slot", "memory", "policy.depth_params", "policy.depthparams.x"):
        with pytest.raises(UsageError, match=r"unknown key|is a table"):
            check_key(wrong)


def test_integer_keys() -> None:
    assert config.is_integer_key("memory.slots")
    assert not config.is_integer_key("machine.link_bandwidth")
    assert not config.is_integer_key("policy.depth_params.depth")


def test_identity_follows_the_content_and_its_context() -> None:
    same = build({"machine": {"link_bandwidth": "25 GB/s"}})
    assert content_hash(same) == content_hash(build({"machine": {"link_bandwidth": 25e9}}))
    assert content_hash(same) != content_hash(RunConfig())
    assert content_hash(same, "trace-a", "0.1.0") != content_hash(same, "trace-b", "0.1.0")
    assert content_hash(same, "trace-a", "0.1.0") != content_hash(same, "trace-a", "0.1.1")


@given(
    slots=st.none() | st.integers(1, 64),
    bits=st.sampled_from([None, 2, 3, 4, 8]),
    rate=st.none() | st.floats(1e6, 1e12),
    depth=st.dictionaries(st.from_regex("[a-z_]{1,8}", fullmatch=True), st.integers(0, 9)),
)
def test_a_written_configuration_runs_as_it_is(
    slots: int | None, bits: int | None, rate: float | None, depth: dict[str, int]
) -> None:
    import tomllib

    written = build(
        {
            "memory": {"slots": slots},
            "experts": {"draft_bits": bits},
            "machine": {"link_bandwidth": rate},
            "policy": {"depth_params": depth},
        }
    )
    assert build(tomllib.loads(to_toml(written))) == written
    assert build(resolved(written)) == written


def test_flatten_and_nest_are_inverse() -> None:
    table = {"a": {"b": 1, "c": {"d": [2]}}, "e": "x"}
    assert nest(flatten(table)) == table


HUGE = int("9" * 400)
ENDLESS = "9" * 5000


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        ({"trace": {"assumed_recall": float("nan")}}, "trace.assumed_recall"),
        ({"trace": {"seed": HUGE}}, "trace.seed: should be less than"),
        ({"trace": {"context": HUGE}}, "trace.context: should be less than"),
        ({"trace": {"tokens": ENDLESS}}, "trace.tokens: "),
        ({"trace": {"tokens": True}}, "trace: tokens must be a number, got true"),
        ({"trace": {"assumed_recall": False}}, "assumed_recall must be a number, got false"),
        ({"memory": {"budget": HUGE}}, "must be finite"),
        ({"memory": {"budget": ENDLESS}}, "must be finite"),
        ({"memory": {"budget": "1e40 GB"}}, "memory.budget: should be less than"),
        ({"machine": {"link_bandwidth": float("inf")}}, "must be finite"),
        ({"machine": {"name": ""}}, "machine.name: should have at least 1 character"),
        ({"model": ""}, "model: should have at least 1 character, got ''"),
        ({"policy": {"depth": -1}}, "depth must be a whole number or a policy, got -1"),
        ({"policy": {"depth": "2.5"}}, "depth must be a whole number or a policy, got 2.5"),
        ({"policy": {"depth": 1 << 20000}}, "policy: "),
        ({"memory": {"slots": 1 << 20000}}, "memory.slots: "),
        ({"memory": {"slots_per_layer": [True]}}, "memory.slots_per_layer"),
        ({"trace.tokens": 8}, '"trace.tokens" is in quotes'),
        ({"policy": {"depth_params": {"depth": float("nan")}}}, "policy.depth_params.depth"),
        ({"preset": ["specter"]}, "preset: should be the name of one, got ['specter']"),
        ({"preset": {"name": 1}}, "preset: should be the name of one"),
    ],
)
def test_senseless_values_are_one_line(layer: dict[str, object], says: str) -> None:
    assert says in refused(layer)
    assert len(refused(layer)) < 300


@pytest.mark.parametrize("wrong", [3, [{"tokens": 3}]])
def test_what_is_no_table_is_refused_under_an_option_too(wrong: object) -> None:
    assert "trace: should be a table" in refused({"trace": wrong}, {"trace": {"tokens": 8}})


def test_broken_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    for text in (
        "a = " + "[" * 5000,
        "a = " + "{a = " * 5000,
        f"a = {ENDLESS}",
        "a" + ".a" * 500 + " = 1",
        "a = " + "[" * 40 + "]" * 40,
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=r"c\.toml"):
            load_table(path)
    with pytest.raises(UsageError, match="a folder, not a regular file"):
        load_table(tmp_path)
    with pytest.raises(UsageError, match="a device, not a regular file"):
        load_table(Path("/dev/zero"))


def test_settings_are_one_line_and_shallow() -> None:
    for setting in ("memory.slots=1\n2", "a" + ".a" * 3000 + "=1"):
        with pytest.raises(UsageError):
            parse_settings([setting])
    assert parse_settings(["a=" + "[" * 5000]) == {"a": "[" * 5000}
    assert parse_settings([f"a={ENDLESS}"]) == {"a": ENDLESS}
