"""Statistics against numbers that can be counted by hand, and against known traces."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from toy_traces import from_ids, toy_trace

from specter_traces import Trace, UsageError
from specter_traces import statistics as stats
from specter_traces.importers import Origin, import_npz_folder
from specter_traces.summary import summarize


def counted() -> Trace:
    """Two sequences of one layer, 6 experts, top-2: [01 02 23] and [45 45]."""
    rows = [[[0, 1]], [[2, 0]], [[2, 3]], [[4, 5]], [[5, 4]]]
    return from_ids(rows, experts=6, lengths=(3, 2))


def test_popularity_and_entropy() -> None:
    trace = counted()
    assert stats.popularity(trace)[0] == pytest.approx([0.4, 0.2, 0.4, 0.2, 0.4, 0.4])
    share = np.array([2, 1, 2, 1, 2, 2]) / 10
    assert stats.layer_entropy(trace)[0] == pytest.approx(-(share * np.log2(share)).sum())


def test_overlap_never_crosses_sequences() -> None:
    trace = counted()
    assert stats.adjacent_overlap(trace)[0] == pytest.approx((1 + 1 + 2) / 3)
    assert stats.adjacent_overlap(trace, 2)[0] == 0
    assert np.isnan(stats.adjacent_overlap(trace, 3)[0])


def test_union_growth_is_the_mean_over_windows() -> None:
    growth = stats.union_growth(counted(), (1, 2, 3, 4))[:, 0]
    assert growth[:3] == pytest.approx([2, (3 + 3 + 2) / 3, 4])
    assert np.isnan(growth[3])


def test_union_growth_agrees_with_sets() -> None:
    trace = toy_trace(lengths=(30, 20))
    assert trace.draft_ids is not None
    windows = [range(s, s + 5) for s in [*range(26), *range(30, 46)]]
    for layer in range(3):
        for ids, given in ((trace.target_ids, None), (trace.draft_ids, trace.draft_ids)):
            sizes = [len({int(e) for t in window for e in ids[t, layer]}) for window in windows]
            growth = stats.union_growth(trace, (5,), ids=given)
            assert growth[0, layer] == pytest.approx(np.mean(sizes))


def paired() -> Trace:
    trace = counted()
    draft = np.array([[[1, 0]], [[2, 5]], [[2, 3]], [[0, 1]], [[4, 5]]], np.uint8)
    return replace(
        trace,
        draft_ids=draft,
        next_tokens=np.array([1, 2, 3, 4, 5], np.int32),
        target_tokens=np.array([7, 7, 7, 7, 7], np.int32),
        draft_tokens=np.array([7, 7, 7, 8, 7], np.int32),
        accept_prob=np.array([1, 1, 0.5, 0.25, 0.75], np.float16),
        prompt_lengths=np.array([2, 0], np.int32),
    )


def test_fidelity() -> None:
    found = stats.fidelity(paired())
    assert found.exact[0] == pytest.approx(3 / 5)
    assert found.recall[0] == pytest.approx((2 + 1 + 2 + 0 + 2) / 10)
    by_distance = stats.fidelity_by_distance(paired(), (0, 1, 2))[:, 0]
    # one later: {0,1} of {0,2}, {2,5} of {2,3}, {0,1} of {4,5}; two later: {0,1} of {2,3}
    assert by_distance == pytest.approx([0.7, 2 / 6, 0.0])


def test_acceptance_counts_the_continuation_only() -> None:
    found = stats.acceptance(paired())
    assert found.greedy == pytest.approx(3 / 4)  # position 0 only leads to prompt tokens
    assert found.sampled == pytest.approx((1 + 0.5 + 0.25 + 0.75) / 4)
    assert found.recall_accepted == pytest.approx((0.5 + 1 + 1) / 3)
    assert found.recall_rejected == 0
    assert stats.survival(paired(), (1, 2)) == pytest.approx([3 / 4, 1 / 2])


def test_gate_fidelity_compares_with_the_next_layer() -> None:
    trace = toy_trace()
    assert stats.gate_fidelity(replace(trace, gate_ids=trace.target_ids[:, 1:])).recall.min() == 1
    with pytest.raises(UsageError, match="no gate predictions"):
        stats.gate_fidelity(replace(trace, gate_ids=None))


def test_an_unpaired_trace_has_no_fidelity() -> None:
    with pytest.raises(UsageError, match="not paired"):
        stats.fidelity(counted())
    with pytest.raises(UsageError, match="not paired"):
        stats.agreement(counted())


def test_repetition() -> None:
    assert stats.repeated_share(np.arange(100)) == 0
    assert stats.repeated_share(np.tile([1, 2, 3], 40)) == pytest.approx(1 - 3 / 113)
    assert stats.repeated_share(np.arange(3)) == 0
    trace = toy_trace(lengths=(40, 40))
    looping = np.concatenate([np.arange(40), np.tile([1, 2], 20)]).astype(np.int32)
    assert stats.repetition(replace(trace, next_tokens=looping)) == pytest.approx([0, 1 - 2 / 33])
    unknown = replace(trace, next_tokens=None).with_header(repetition=(0.25, -1.0))
    assert stats.repetition(unknown)[0] == 0.25 and np.isnan(stats.repetition(unknown)[1])


def test_a_summary_is_plain_json() -> None:
    import json

    document = json.loads(
        json.dumps(summarize(toy_trace(lengths=(4, 4))).as_json(), allow_nan=False)
    )
    assert document["union_growth"][-1] == [None] * 3
    assert document["header"]["draft"]["kind"] == "symmetric"
    assert summarize(counted()).uniform_union(1) == pytest.approx(2)


@pytest.fixture(scope="module")
def gpt_oss(shared: Path) -> Trace:
    return import_npz_folder(
        shared / "traces" / "gpt-oss-20b", Origin("gpt-oss-20b", num_experts=32), clean=False
    )


def test_known_facts_of_gpt_oss(gpt_oss: Trace) -> None:
    assert (gpt_oss.num_layers, gpt_oss.num_experts, gpt_oss.top_k) == (24, 32, 4)
    assert gpt_oss.num_sequences == 231
    assert stats.adjacent_overlap(gpt_oss).mean() == pytest.approx(1.74, abs=0.01)
    assert stats.uniform_overlap(gpt_oss) == 0.5


def lookups_deeper_than(trace: Trace) -> np.ndarray:
    """Count, for every lookup, the experts of its layer used since its own last use; 99 if never.

    Each expert of a row is looked up in rank order; every sequence starts cold. An LRU cache of
    so many slots or fewer misses that lookup.
    """
    layers = np.arange(trace.num_layers)
    depths = []
    for part in trace:
        used = np.full((trace.num_layers, trace.num_experts), -1)
        rows = np.moveaxis(part.target_ids.astype(int), 1, 2).reshape(-1, trace.num_layers)
        for tick, experts in enumerate(rows):
            last = used[layers, experts]
            depths.append(np.where(last < 0, 99, (used > last[:, None]).sum(axis=1)))
            used[layers, experts] = tick
    return np.array(depths)


def test_a_cache_hits_as_it_is_known_to_on_gpt_oss(gpt_oss: Trace) -> None:
    depth = lookups_deeper_than(gpt_oss.select(range(0, gpt_oss.num_sequences, 3)))
    rates = [float((depth < slots).mean()) for slots in (8, 12, 16, 24)]
    assert rates == pytest.approx([0.615, 0.782, 0.884, 0.965], abs=0.01)
