"""Each broken invariant and each trap is found, and sound traces are left alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toy_traces import best, from_ids, toy_trace

from specter_traces import SequenceInfo, Trace, validate


def problems(trace: Trace, *, thorough: bool = True) -> list[str]:
    return [str(problem) for problem in validate(trace, thorough=thorough)]


@pytest.mark.parametrize("paired", [True, False])
def test_a_sound_trace_has_no_problem(paired: bool) -> None:
    assert problems(toy_trace(paired=paired).sealed()) == []


def test_a_trace_too_small_to_judge_has_no_problem() -> None:
    assert problems(from_ids([[[0]], [[0]], [[0]]], experts=2)) == []
    assert problems(from_ids([[[0, 1]]] * 50, experts=2)) == []


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("num_layers", 0, "header: num_layers: got 0, expected at least 1"),
        ("top_k", 17, "header: top_k: got 17, expected at most 16 experts"),
        ("num_experts", 70000, "header: num_experts: got 70000, expected at most 65536"),
        ("sequences", (SequenceInfo("a"),), "header: entries of sequences: got 1, expected 2"),
        ("repetition", (0.0, 0.0, 0.0), "header: entries of repetition: got 3, expected 2"),
    ],
)
def test_header_problems(field: str, value: Any, expected: str) -> None:
    assert problems(toy_trace().with_header(**{field: value}))[0].startswith(expected)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("target_ids", np.zeros((65, 3, 4), np.uint8), "shape [T, L, K]: got [65, 3, 4]"),
        ("draft_ids", np.zeros((64, 3, 3), np.uint8), "shape [T, L, K]: got [64, 3, 3]"),
        ("gate_ids", np.zeros((65, 3, 3), np.uint8), "expected [65, 2, 3]"),
        ("target_weights", np.zeros((65, 3, 3)), "number type: got float64, expected float16"),
        ("prompt_lengths", np.zeros(2, np.int64), "number type: got int64, expected int32"),
        ("draft_tokens", None, "column of a paired trace: got absent, expected present"),
        ("draft_ids", None, "column of a paired trace: got absent, expected present"),
        ("sequence_offsets", np.array([0, 40]), "expected [1]"),
    ],
)
def test_form_problems(name: str, value: Any, expected: str) -> None:
    trace = replace(toy_trace(), **{name: value})
    assert any(expected in problem for problem in problems(trace, thorough=False))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("sequence_offsets", np.array([1, 40, 65]), "first offset: got 1, expected 0"),
        ("sequence_offsets", np.array([0, 40, 66]), "last offset: got 66, expected 65 positions"),
        ("sequence_offsets", np.array([0, 70, 65]), "length of sequence 1: got -5"),
        ("sequence_offsets", np.array([0, 0, 65]), "length of sequence 0: got 0"),
        ("prompt_lengths", np.array([5, 26], np.int32), "prompt of sequence 1: got 26"),
        ("prompt_lengths", np.array([-1, 5], np.int32), "prompt of sequence 0: got -1"),
        ("next_tokens", np.full(65, -2, np.int32), "next_tokens: token: got -2"),
    ],
)
def test_range_problems(name: str, value: Any, expected: str) -> None:
    trace = replace(toy_trace(), **{name: value})
    assert any(expected in problem for problem in problems(trace, thorough=False))


@pytest.mark.parametrize("name", ["target_ids", "draft_ids", "gate_ids"])
def test_ids_out_of_range_and_repeated(name: str) -> None:
    trace = toy_trace()
    getattr(trace, name)[7, 1, 2] = 16
    assert problems(trace, thorough=False) == [
        f"{name}: id at [7, 1, 2]: got 16, expected below 16"
    ]
    getattr(trace, name)[7, 1] = [4, 2, 4]
    assert problems(trace) == [
        f"{name}: ids at [7, 1] (1 such rows): got [4, 2, 4], expected 3 distinct experts"
    ]
    assert problems(trace, thorough=False) == []


def test_impossible_values() -> None:
    trace = toy_trace()
    assert trace.accept_prob is not None and trace.target_weights is not None
    trace.accept_prob[3] = 1.5
    trace.target_weights[3, 0, 0] = np.nan
    found = problems(trace)
    assert found[0] == "target_weights: values: got NaN or infinite, expected finite"
    assert found[1].startswith("accept_prob: probability") and "1.500" in found[1]


def test_a_wrong_hash() -> None:
    trace = toy_trace().sealed()
    trace.target_ids[0, 0] = trace.target_ids[0, 0, ::-1].copy()
    assert problems(trace)[0].startswith("header: content hash")


def drifting(tokens: int, layers: int = 8, seed: int = 0, memory: float = 0.8) -> Any:
    rng = np.random.default_rng(seed)
    score = rng.standard_normal((tokens, layers, 32))
    for position in range(1, tokens):
        score[position] = memory * score[position - 1] + np.sqrt(1 - memory**2) * score[position]
    return best(score, 4)


def test_constant_rows_at_the_start() -> None:
    ids = drifting(100)
    ids[60:63] = ids[60]
    assert problems(from_ids(ids)) == []  # a loop in the middle is the text's own
    found = problems(from_ids(ids, lengths=(60, 40)))
    assert len(found) == 1
    assert "constant rows at the start of sequence 1: got 3 equal rows" in found[0]


def test_copied_layers() -> None:
    ids = drifting(100)
    ids[:70, 6] = ids[:70, 2]
    (found,) = problems(from_ids(ids))
    assert "layer 6 is a copy of layer 2: got 70% equal rows" in found


@pytest.mark.parametrize("batch", [2, 3, 8])
def test_interleaved_rows(batch: int) -> None:
    rows = np.stack([drifting(300, seed=s) for s in range(batch)], axis=1)
    (found,) = problems(from_ids(rows.reshape(-1, 8, 4)))
    assert f"rows look interleaved by batch (stride {batch})" in found
    apart = np.concatenate([rows[:, i] for i in range(batch)])
    assert problems(from_ids(apart, lengths=(300,) * batch)) == []


def test_a_looping_text_is_not_called_interleaved() -> None:
    assert problems(from_ids(np.tile(drifting(10), (60, 1, 1)))) == []


@pytest.mark.parametrize("shift", [0, 1, 7])
def test_rows_shifted_against_their_tokens(shift: int) -> None:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 40, 800)
    table = rng.standard_normal((40, 1, 32))  # layer 0 follows the token
    score = np.concatenate([table[tokens], rng.standard_normal((800, 5, 32))], axis=1)
    ids = np.roll(best(score + 0.2 * rng.standard_normal(score.shape), 4), shift, axis=0)
    trace = replace(from_ids(ids), next_tokens=np.roll(tokens, -1).astype(np.int32))
    found = problems(trace)
    if shift:
        assert len(found) == 1 and "rows look shifted against their tokens" in found[0]
    else:
        assert found == []
