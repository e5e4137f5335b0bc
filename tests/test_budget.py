"""Device memory: the plan is a cap, and what really is allocated stays below it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from live import PROMPT, plain_text, session_of, text_of, tiny_moe, toy_checkpoint
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specter_runtime.budget import smallest_budget
from specter_traces import UsageError


class Peak(TorchDispatchMode):
    """Follows every tensor made inside: bytes alive now, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if _is_tensor(leaf) and _key(leaf) not in known:
                storage = leaf.untyped_storage()
                self._alive[_key(leaf)] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        self._alive = {key: kept for key, kept in self._alive.items() if not kept[0].expired()}  # type: ignore[no-untyped-call]
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
        return output


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@pytest.mark.parametrize("depth", [0, 8])
@pytest.mark.parametrize("model", ["tiny-moe", "qwen3-moe", "deepseek-v2", "gpt-oss"])
def test_what_is_allocated_stays_below_the_plan(model: str, depth: int) -> None:
    """KV and scratch are planned before; every tensor that decoding makes is counted."""
    checkpoint = tiny_moe("bfloat16") if model == "tiny-moe" else toy_checkpoint(model)
    prompt = [place % 90 for place in range(70)]
    options = {"context_tokens": 100, "chunk_tokens": 32}
    with session_of(checkpoint, options, policy__depth=depth) as session:
        text_of(session, 8, prompt)  # what is made once and kept belongs to nobody's request
        with Peak() as peak:
            text_of(session, 30, prompt)
        fixed = session.budget.fixed
        assert peak.peak_bytes <= fixed.kv_bytes + fixed.scratch_bytes
        assert peak.peak_bytes >= session.model.kv.nbytes() > 0  # the check sees the cache
        assert session.model.kv.peak_bytes <= fixed.kv_bytes
        assert session.slots.nbytes == session.budget.slot_bytes
        assert session.peak_device_bytes <= session.budget.total_bytes


@pytest.mark.parametrize("layout", ["per-layer", "global"])
@pytest.mark.parametrize("depth", [0, 4])
def test_a_budget_is_a_cap_and_is_used(layout: str, depth: int) -> None:
    settings: dict[str, Any] = {"memory__layout": layout, "policy__depth": depth}
    with session_of(toy_checkpoint(), memory__slots=3, **settings) as session:
        smallest = session.budget.total_bytes
        each = session.prepared.store.expert_bytes[0]
    step = each * (3 if layout == "per-layer" else 1)
    for extra, slots in ((0, 9), (step - 1, 9), (step, 9 + step // each)):
        budget = smallest + extra
        with session_of(toy_checkpoint(), memory__budget=budget, **settings) as session:
            assert session.budget.total_bytes <= budget
            assert sum(session.budget.groups) == slots
    with session_of(toy_checkpoint(), memory__budget="1 GiB", **settings) as session:
        assert sum(session.budget.groups) == 24  # never more than there are experts


def test_the_smallest_budget_that_works_works() -> None:
    with session_of(toy_checkpoint(), memory__slots=3, policy__depth=2) as session:
        prepared = session.prepared
        least = smallest_budget(prepared.config.memory, prepared.store, prepared.budget.fixed, 3)
    expected = plain_text(toy_checkpoint(), 12)
    with session_of(toy_checkpoint(), memory__budget=least, policy__depth=2) as session:
        assert text_of(session, 12, PROMPT) == expected
    with pytest.raises(UsageError, match=f"the smallest budget that works is {least} B"):
        session_of(toy_checkpoint(), memory__budget=least - 1, policy__depth=2)


def test_the_draft_is_charged() -> None:
    """At equal memory, whoever drafts has fewer slots."""
    pooled: dict[str, Any] = {"memory__layout": "global"}
    with session_of(toy_checkpoint(), memory__slots=4, policy__depth=1, **pooled) as session:
        budget, fixed = session.budget.total_bytes, session.budget.fixed
        assert session.prepared.draft is not None
        assert fixed.draft_bytes == session.prepared.draft.nbytes > 0
    with session_of(toy_checkpoint(), memory__budget=budget, **pooled) as session:
        assert sum(session.budget.groups) > 12
