"""What the simulator expects of a live run, from this machine's timings and the run's routes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from live import config_of, text_of, tiny_moe

from specter_runtime import calibration
from specter_runtime.calibration import Calibration, calibrate, fit
from specter_runtime.devices import DeviceKind
from specter_runtime.loaded_model import LoadedModel
from specter_runtime.prediction import WrittenText, predict, record
from specter_runtime.prepare import plan
from specter_runtime.quantizer import parse
from specter_runtime.session import Session, SessionOptions
from specter_runtime.stopwatch import Samples
from specter_sim.results import Result
from specter_traces import SpecterError

PROMPT = [80, 301, 44, 907, 15, 230, 1201, 33]
TOKENS = 16
CODE = parse("base4", 64)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- fit


def samples_of(slow: float = 1.0, every: int = 11) -> Samples:
    """Timings of a machine that follows the model exactly, but for one in `every`."""
    samples = Samples()
    for place in range(200):
        factor = slow if place % every == 0 else 1.0
        tokens, experts = 1 + place % 9, 1 + place % 7
        routes = experts + place % 13
        samples.drafts.append(4e-3 * factor)
        samples.passes.append((tokens, (2e-3 + 3e-4 * tokens) * factor, 1e-4 * factor))
        samples.runs.append((experts, routes, (5e-5 + 2e-5 * experts + 7e-6 * routes) * factor))
    return samples


@pytest.mark.parametrize("slow", [1.0, 20.0])
def test_a_linear_machine_is_recovered_also_when_it_is_disturbed(slow: float) -> None:
    found = fit(samples_of(slow), 4, 100, 128)
    costs = found.costs
    assert costs.draft_step_s(500) == pytest.approx(4e-3, rel=1e-6)
    for tokens in (1, 5, 30):
        pass_s = 2e-3 + 1e-4 + 3e-4 * tokens
        assert 4 * costs.layer_s(tokens, 500) == pytest.approx(pass_s, rel=1e-6)
    assert costs.experts_s(3, 10) == pytest.approx(5e-5 + 3 * 2e-5 + 10 * 7e-6, rel=1e-6)
    assert costs.fixed_s(9, 500) == 0
    assert (costs.load_bytes, costs.slot_bytes, costs.has_draft) == (100, 128, True)
    assert [found.fast, found.slow] == pytest.approx([1.0, 1.0])


def test_fast_and_slow_are_the_quartiles_of_what_was_measured() -> None:
    samples = samples_of()
    factors = np.linspace(0.8, 1.2, len(samples.passes))
    np.random.default_rng(0).shuffle(factors)
    samples.passes = [
        (tokens, compute_s * factor, rest_s * factor)
        for (tokens, compute_s, rest_s), factor in zip(samples.passes, factors, strict=True)
    ]
    found = fit(samples, 4, 100, 128)
    assert found.fast == pytest.approx(0.9, abs=0.04)
    assert found.slow == pytest.approx(1.1, abs=0.04)


def test_every_compute_cost_is_scaled_and_nothing_else() -> None:
    found = fit(samples_of(), 4, 100, 128)
    doubled = found.scaled(2.0)
    assert doubled.draft_step_s(9) == 2 * found.costs.draft_step_s(9)
    assert doubled.layer_s(3, 9) == pytest.approx(2 * found.costs.layer_s(3, 9))
    assert doubled.experts_s(3, 9) == pytest.approx(2 * found.costs.experts_s(3, 9))
    assert doubled.load_bytes == found.costs.load_bytes


def test_no_timings_no_costs_and_no_drafts_no_draft() -> None:
    with pytest.raises(SpecterError, match="there are none"):
        fit(Samples(), 4, 100, 128)
    without = replace(samples_of(), drafts=[])
    costs = fit(without, 4, 100, 128).costs
    assert not costs.has_draft and math.isinf(costs.draft_step_s(1))


# --- predict


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedModel]:
    checkpoint = tiny_moe("float32")  # in BF16 a near tie of a router may fall either way
    checkpoint.model.generation_config.eos_token_id = None
    loaded = LoadedModel.take(checkpoint)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def calibrated(loaded: LoadedModel) -> Calibration:
    with pytest.MonkeyPatch.context() as shorter:
        shorter.setattr(calibration, "TOKENS", 8)
        shorter.setattr(calibration, "WARM_UP_TOKENS", 2)
        return calibrate(loaded, config_of(), SessionOptions(context_tokens=64), PROMPT)


def run_and_expect(
    loaded: LoadedModel, calibrated: Calibration, **dotted: Any
) -> tuple[Result, Result, Result, Result]:
    """A live run, and what is expected of it: as measured, fast and slow."""
    options = SessionOptions(device=DeviceKind.EMULATED, context_tokens=64)
    prepared = plan(loaded, config_of(**dotted), options)
    with Session(prepared) as session:
        text = text_of(session, TOKENS, PROMPT)
        live = session.result()
    written = WrittenText((*PROMPT, *text), len(PROMPT))
    found = predict(prepared, record(loaded, CODE, [written], None), calibrated)
    return live, found.result, found.fast, found.slow


@pytest.mark.parametrize("layout", ["per-layer", "global"])
def test_loads_are_expected_exactly_and_time_within_a_factor_of_two(
    loaded: LoadedModel, calibrated: Calibration, layout: str
) -> None:
    """On demand from an LRU cache, on a link so slow that little else counts."""
    settings: dict[str, Any] = {
        "memory__slots": 12,
        "memory__layout": layout,
        "machine__link_bandwidth": "60 MB/s",
        "policy__depth": 0,
    }
    live, expected, fast, slow = run_and_expect(loaded, calibrated, **settings)
    assert live.committed_tokens == expected.committed_tokens == TOKENS
    assert (live.demands, live.hits, live.misses) == (
        expected.demands,
        expected.hits,
        expected.misses,
    )
    assert live.bytes_per_token == expected.bytes_per_token > 1e6
    assert live.tpot_s / 2 < expected.tpot_s < live.tpot_s * 2
    assert fast.tpot_s <= expected.tpot_s <= slow.tpot_s
    assert live.device_bytes == expected.device_bytes


def test_a_faster_link_is_expected_to_be_faster(
    loaded: LoadedModel, calibrated: Calibration
) -> None:
    """The prediction follows the configuration, not the run whose routes it was given."""
    options = SessionOptions(context_tokens=64)
    written = WrittenText((*PROMPT, *range(40, 40 + TOKENS)), len(PROMPT))
    trace = record(loaded, CODE, [written], None)
    tpots = []
    for rate in ("2 MB/s", "10 MB/s", "10 GB/s"):
        config = config_of(
            memory__slots=8,
            machine__link_bandwidth=rate,
            policy__depth=3,
            policy__prefetch="continuous",
        )
        tpots.append(predict(plan(loaded, config, options), trace, calibrated).result.tpot_s)
    assert tpots[0] > 2 * tpots[1] > 2 * tpots[2] > 0
