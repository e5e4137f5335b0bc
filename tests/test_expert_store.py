"""The expert store: every byte as in the model, aligned, freed there, locked as far as allowed."""

from __future__ import annotations

import gc
import mmap
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_checkpoints import TOYS, make

from specter_runtime.expert_store import ALIGNMENT_BYTES, ExpertStore
from specter_runtime.experts import ExpertLayer, expert_weights, install
from specter_runtime.page_lock import PageLock
from specter_traces import SpecterError


def take(name: str) -> tuple[ExpertStore, dict[tuple[int, int, str], Tensor], Any]:
    """The store of a toy, every expert matrix cloned before, and the model left behind."""
    model = make(TOYS[name])
    layers = install(model)
    expected = {
        (layer.index, expert, part): weight.detach()[expert].clone()
        for layer in layers
        for part, weight in expert_weights(layer.experts).items()
        for expert in range(layer.num_experts)
    }
    return ExpertStore.take(layers), expected, model


class OddExperts(nn.Module):
    """An experts module of two matrices whose sizes are no multiples of the alignment."""

    def __init__(self, experts: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, 5).to(dtype))
        self.down = nn.Parameter(torch.randn(experts, 5, width).transpose(1, 2))
        self.up_bias = nn.Parameter(torch.randn(experts, width))


def odd_layers() -> tuple[ExpertLayer, ...]:
    torch.manual_seed(0)
    modules = [OddExperts(3, 7, torch.bfloat16), OddExperts(5, 11, torch.float16)]
    return tuple(
        ExpertLayer(index, f"layers.{index}.experts", module, module, len(module.up))
        for index, module in enumerate(modules)
    )


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_every_expert_is_stored_as_the_model_held_it(name: str) -> None:
    store, expected, _ = take(name)
    assert (store.layers, store.experts) == (3, (8, 8, 8))
    seen = {
        (layer, expert, part): weight
        for layer in range(store.layers)
        for expert in range(store.experts[layer])
        for part, weight in store.weights(layer, expert).items()
    }
    assert seen.keys() == expected.keys()
    assert all(torch.equal(seen[key], expected[key]) for key in expected)
    store.verify()


def test_the_model_loses_the_weights_and_keeps_the_biases() -> None:
    model = make(TOYS["gpt-oss"])
    layers = install(model)
    watched = [weakref.ref(w) for la in layers for w in expert_weights(la.experts).values()]
    biases = [name for name, _ in layers[0].experts.named_parameters() if "bias" in name]
    ExpertStore.take(layers)
    gc.collect()
    assert len(watched) == 6 and not any(weight() is not None for weight in watched)
    assert [name for name, _ in layers[0].experts.named_parameters()] == biases != []


def test_layers_of_other_sizes_and_number_types_keep_both() -> None:
    layers = odd_layers()
    expected = [[w.detach().clone() for w in expert_weights(la.experts).values()] for la in layers]
    store = ExpertStore.take(layers)
    assert store.experts == (3, 5)
    assert [part.dtype for part in store.parts[0]] == [torch.bfloat16, torch.float32]
    assert [part.offset for part in store.parts[0]] == [0, 128]
    assert store.expert_bytes == (128 + 192, 128 + 256)
    assert store.nbytes == 3 * 320 + 5 * 384
    for layer, expert in [(0, 2), (1, 4)]:
        found = store.weights(layer, expert).values()
        assert all(torch.equal(f, e[expert]) for f, e in zip(found, expected[layer], strict=True))


def test_runs_are_aligned_and_follow_each_other() -> None:
    store = ExpertStore.take(odd_layers())
    for layer in range(2):
        first = store.run(layer, 0).data_ptr()
        assert first % mmap.PAGESIZE == 0
        for expert in range(store.experts[layer]):
            address = store.run(layer, expert).data_ptr()
            assert address == first + expert * store.expert_bytes[layer]
            for part in store.parts[layer]:
                view = store.weights(layer, expert)[part.name]
                assert view.data_ptr() == address + part.offset
                assert view.data_ptr() % ALIGNMENT_BYTES == 0 and view.is_contiguous()
    for layer, expert in [(2, 0), (0, 3), (-1, 0), (0, -1)]:
        with pytest.raises(IndexError, match="no expert"):
            store.run(layer, expert).data_ptr()


def test_a_watcher_sees_every_expert_once_in_order() -> None:
    seen: list[tuple[int, int]] = []
    sums: list[float] = []
    layers = odd_layers()

    def watch(layer: int, expert: int, weights: dict[str, Tensor]) -> None:
        seen.append((layer, expert))
        sums.append(float(weights["down"].sum()))

    store = ExpertStore.take(layers, watch)
    assert seen == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4)]
    assert sums == [float(store.weights(*where)["down"].sum()) for where in seen]


def test_a_changed_byte_is_found_by_its_expert() -> None:
    store, _, _ = take("mixtral")
    store.verify()
    before = store.checksum(1, 5)
    weight = next(iter(store.weights(1, 5).values()))
    weight.view(-1)[3] = -weight.view(-1)[3]
    assert store.checksum(1, 5) == before
    with pytest.raises(SpecterError, match=r"expert 5 of MoE layer 1 .*changed in host memory"):
        store.verify()


def test_equal_experts_have_equal_checksums_and_others_do_not() -> None:
    layers = odd_layers()
    for weight in expert_weights(layers[0].experts).values():
        weight.data[1] = weight.data[0]
    store = ExpertStore.take(layers)
    assert store.checksum(0, 0) == store.checksum(0, 1) != store.checksum(0, 2)


def test_weights_of_different_numbers_of_experts_are_refused() -> None:
    layers = odd_layers()
    layers[0].experts.up = nn.Parameter(torch.randn(4, 7, 5))
    with pytest.raises(SpecterError, match=r"different numbers of experts: \{'up': 4, 'down': 3\}"):
        ExpertStore.take(layers)


def test_locked_pages_show_in_the_process_and_are_given_back() -> None:
    store, _, _ = take("mixtral")
    before = locked_kib()
    locked = store.lock_pages(5 * mmap.PAGESIZE + 1)
    if locked == 0:
        pytest.skip("this system lets us lock no memory")
    assert locked == 5 * mmap.PAGESIZE
    assert locked_kib() - before == locked // 1024
    assert store.lock_pages(3 * mmap.PAGESIZE) == 3 * mmap.PAGESIZE
    assert locked_kib() - before == 3 * mmap.PAGESIZE // 1024
    store.close()
    assert locked_kib() == before


def locked_kib() -> int:
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmLck")).split()[1])


REFUSED = """
import ctypes, os, resource, sys
sys.path[:0] = {path!r}
import mmap
from specter_runtime.page_lock import PageLock
limit = 100 * mmap.PAGESIZE + 7
resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
if os.geteuid() == 0:
    os.setuid(65534)  # root is not limited
memory = mmap.mmap(-1, 300 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
lock = PageLock()
first = lock.lock(address, 60 * mmap.PAGESIZE)
rest = lock.lock(address + first, 240 * mmap.PAGESIZE)
print(first // mmap.PAGESIZE, rest // mmap.PAGESIZE, ctypes.get_errno(), end=" ")
lock.close()
print(lock.locked_bytes, lock.lock(address, 100 * mmap.PAGESIZE) // mmap.PAGESIZE)
"""


def test_a_refusal_after_some_bytes_keeps_what_was_locked() -> None:
    script = REFUSED.format(path=sys.path)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.stdout.split() == ["60", "40", "0", "0", "100"], run.stderr


def test_a_lock_of_nothing_is_nothing() -> None:
    lock = PageLock()
    assert lock.lock(mmap.PAGESIZE, 0) == 0
    assert lock.locked_bytes == 0
    lock.close()
