"""Synthetic traces resemble their source, and say what they are."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_traces import best, from_ids, toy_trace

from specter_traces import Trace, UsageError, bundled, bundled_names, validate
from specter_traces import statistics as stats
from specter_traces.importers import Origin, import_npz_folder
from specter_traces.synthesize import synthesize, with_assumed_draft

SHAPES = [(26, 64, 6), (24, 128, 8), (12, 8, 2)]


def local_trace(paired: bool = True) -> Trace:
    """A source with memory on two scales, skewed use, and doubtful positions in runs."""
    rng = np.random.default_rng(3)
    tokens, layers, experts, top_k = 3000, 6, 32, 4
    fast, slow = (rng.standard_normal((tokens, layers, experts)) for _ in range(2))
    for t in range(1, tokens):
        fast[t] = 0.5 * fast[t - 1] + np.sqrt(0.75) * fast[t]
        slow[t] = 0.99 * slow[t - 1] + np.sqrt(1 - 0.99**2) * slow[t]
    score = 0.7 * fast + 0.6 * slow + 0.5 * rng.standard_normal(experts)
    trace = from_ids(best(score, top_k), experts, lengths=(1000, 1500, 500))
    if not paired:
        return trace
    doubt = np.repeat(rng.random(tokens // 10) < 0.3, 10)
    agree = rng.random(tokens) > np.where(doubt, 0.4, 0.04)
    blur = np.where(agree, 0.1, 0.35)[:, None, None]
    return replace(
        trace,
        draft_ids=best(score + blur * rng.standard_normal(score.shape), top_k),
        gate_ids=best((score + 0.4 * rng.standard_normal(score.shape))[:, 1:], top_k),
        next_tokens=rng.integers(0, 500, tokens).astype(np.int32),
        target_tokens=np.ones(tokens, np.int32),
        draft_tokens=agree.astype(np.int32),
        accept_prob=np.where(agree, 0.95, 0.2).astype(np.float16),
    )


def locality(trace: Trace, lag: int) -> float:
    """How far neighbours are from uniform routing (0) towards equal routes (1)."""
    floor = stats.uniform_overlap(trace)
    return float((stats.adjacent_overlap(trace, lag).mean() - floor) / (trace.top_k - floor))


def independent_positions(trace: Trace) -> Any:
    """How many positions of uniform routing would need the mean union of each window.

    Comparable between shapes, unlike the union itself, which ends at E.
    """
    share = stats.union_growth(trace).mean(axis=1) / trace.num_experts
    return np.log1p(-share) / np.log1p(-trace.top_k / trace.num_experts)


def skew(trace: Trace) -> float:
    """Share of all use that falls on the busiest quarter of a layer's experts."""
    use = -np.sort(-stats.popularity(trace), axis=1)
    return float(use[:, : trace.num_experts // 4].sum(axis=1).mean() / trace.top_k)


def assert_alike(made: Trace, source: Trace, union_tolerance: float = 0.12) -> None:
    for lag in (1, 2, 4, 8, 16):
        assert locality(made, lag) == pytest.approx(locality(source, lag), abs=0.05), lag
    growth = independent_positions(source)
    assert independent_positions(made) == pytest.approx(growth, rel=union_tolerance)
    assert skew(made) == pytest.approx(skew(source), abs=0.1)
    if source.is_paired:
        assert_drafts_alike(made, source)
    if source.gate_ids is not None:
        recall = stats.gate_fidelity(source).recall.mean()
        assert stats.gate_fidelity(made).recall.mean() == pytest.approx(recall, abs=0.03)


def assert_drafts_alike(made: Trace, source: Trace) -> None:
    ours, theirs = stats.acceptance(made), stats.acceptance(source)
    assert ours.greedy == pytest.approx(theirs.greedy, abs=0.04)
    assert ours.sampled == pytest.approx(theirs.sampled, abs=0.04)
    assert ours.recall_accepted == pytest.approx(theirs.recall_accepted, abs=0.012)
    assert ours.recall_rejected == pytest.approx(theirs.recall_rejected, abs=0.04)
    assert stats.survival(made) == pytest.approx(stats.survival(source), abs=0.08)


@pytest.fixture(scope="module")
def source() -> Trace:
    return local_trace()


@pytest.mark.parametrize("shape", SHAPES)
def test_another_shape_keeps_the_kind_of_routing(
    source: Trace, shape: tuple[int, int, int]
) -> None:
    made = synthesize(source, *shape, tokens=2000, seed=1)
    assert validate(made) == []
    assert (made.num_layers, made.num_experts, made.top_k) == shape
    assert_alike(made, source)


def test_the_same_shape_is_matched_closely(source: Trace) -> None:
    made = synthesize(source, 6, 32, 4, tokens=3000, seed=2)
    assert_alike(made, source, union_tolerance=0.04)
    exact = stats.fidelity(source).exact.mean()
    assert stats.fidelity(made).exact.mean() == pytest.approx(exact, abs=0.06)


def test_layers_keep_their_own_locality() -> None:
    ids = local_trace(paired=False).target_ids.copy()
    rng = np.random.default_rng(0)
    ids[:, :3] = best(rng.standard_normal((len(ids), 3, 32)), 4)  # shallow layers forget
    made = synthesize(from_ids(ids), 20, 32, 4, tokens=1500, seed=0)
    overlap = stats.adjacent_overlap(made)
    assert overlap[:10].max() < 0.8 < 1.5 < overlap[10:].min()
    assert not made.is_paired and made.gate_ids is None


def test_synthetic_traces_say_so(source: Trace) -> None:
    made = synthesize(source, 4, 16, 2, tokens=300, seed=5)
    assert made.header.synthetic and made.header.synthesized_from == "toy"
    assert "synthetic" in made.header.name and "synthetic" in made.header.model
    assert made.header.marks == ("synthetic (from toy)",)
    assert made.num_positions == 300
    assert made.next_tokens is not None and (made.next_tokens == -1).all()


def test_sequences_are_as_long_as_the_source_s(source: Trace) -> None:
    made = synthesize(source, 2, 8, 2, tokens=4200, seed=0)
    assert np.diff(made.sequence_offsets).tolist() == [1000, 1500, 500, 1000, 200]


def test_a_seed_decides_everything(source: Trace) -> None:
    hashes = [synthesize(source, 3, 16, 2, 400, seed).header.content_hash for seed in (1, 1, 2)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_weights_keep_their_profile() -> None:
    made = synthesize(toy_trace(lengths=(200,)), 4, 32, 6, tokens=100, seed=0)
    assert made.target_weights is not None and made.draft_weights is not None
    rows = made.target_weights.astype(float)
    assert rows.shape == (100, 4, 6) and (np.diff(rows, axis=-1) <= 0).all()
    assert rows.sum(axis=-1) == pytest.approx(1, abs=5e-3)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ((0, 8, 2, 100), "at least 1 for layers"),
        ((2, 8, 9, 100), "top-9 of 8 experts is impossible"),
        ((2, 8, 2, 0), "at least 1 token"),
    ],
)
def test_impossible_requests(
    source: Trace, request_: tuple[int, int, int, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        synthesize(source, *request_, seed=0)


def test_a_short_source_is_refused() -> None:
    with pytest.raises(UsageError, match="too few to learn from"):
        synthesize(toy_trace(lengths=(50, 50)), 2, 8, 2, 100, 0)


def test_every_expert_can_be_needed() -> None:
    made = synthesize(local_trace(paired=False), 2, 4, 4, tokens=50, seed=0)
    assert validate(made) == []


@pytest.mark.parametrize("name", bundled_names())
def test_bundled_traces_can_be_carried_to_other_shapes(name: str) -> None:
    trace = bundled(name)
    made = synthesize(trace, 12, 64, 6, tokens=2000, seed=0)
    assert validate(made) == []
    assert_alike(made, trace)


def test_gpt_oss_can_be_carried_to_another_shape(shared: Path) -> None:
    folder = shared / "traces" / "gpt-oss-20b"
    trace = import_npz_folder(folder, Origin("gpt-oss", num_experts=32), limit=20)
    assert_alike(synthesize(trace, 12, 64, 6, tokens=2000, seed=0), trace)


# --- assumed drafts ---------------------------------------------------------------------------


@pytest.mark.parametrize(("acceptance", "recall"), [(0.9, 0.95), (0.6, 0.7), (1, 1), (0, 0.5)])
def test_an_assumed_draft_has_the_assumed_quality(acceptance: float, recall: float) -> None:
    trace = with_assumed_draft(local_trace(paired=False), acceptance, recall, seed=0)
    assert validate(trace) == []
    assert trace.header.assumed_draft and trace.header.marks == ("assumed draft",)
    assert "acceptance" in trace.header.notes[-1]
    found = stats.acceptance(trace)
    assert found.greedy == pytest.approx(acceptance, abs=0.02)
    assert found.sampled == pytest.approx(acceptance, abs=0.02)
    assert stats.fidelity(trace).recall == pytest.approx(recall, abs=0.01)


def test_doubtful_positions_get_more_route_errors_on_low_ranks() -> None:
    trace = with_assumed_draft(local_trace(paired=False), 0.8, 0.9, seed=0)
    found = stats.acceptance(trace)
    assert found.recall_rejected < found.recall_accepted - 0.02
    assert trace.draft_ids is not None
    errors = (trace.draft_ids != trace.target_ids).mean(axis=(0, 1))
    assert (np.diff(errors) > 0).all()


def test_few_spare_experts() -> None:
    ids = best(np.random.default_rng(0).standard_normal((500, 2, 5)), 4)
    trace = with_assumed_draft(from_ids(ids, experts=5), 0.9, 0.8, seed=0)
    assert validate(trace) == []
    assert stats.fidelity(trace).recall == pytest.approx(0.8, abs=0.02)
    with pytest.raises(UsageError, match=r"recall is at least 0\.75, got 0\.5"):
        with_assumed_draft(from_ids(ids, experts=5), 0.9, 0.5, seed=0)


def test_assumptions_are_checked(source: Trace) -> None:
    plain = local_trace(paired=False)
    with pytest.raises(UsageError, match="assumed acceptance lies between 0 and 1"):
        with_assumed_draft(plain, 1.5, 0.9, 0)
    with pytest.raises(UsageError, match="assumed recall lies between"):
        with_assumed_draft(plain, 0.9, float("nan"), 0)
    with pytest.raises(UsageError, match="has a draft of its own"):
        with_assumed_draft(source, 0.9, 0.9, 0)


def test_marks_add_up() -> None:
    assumed = with_assumed_draft(local_trace(paired=False), 0.9, 0.95, seed=0)
    made = synthesize(assumed, 3, 16, 2, 300, seed=0)
    assert made.header.marks == ("synthetic (from toy)", "assumed draft")
