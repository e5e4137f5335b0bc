"""A real model's routes: the hit rates of a per-layer LRU are known from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specter_sim.policies import EVICTION
from specter_sim.policies.state import new_state
from specter_sim.replay import replay_sequential

LAYERS, EXPERTS, TOP_K = 24, 32, 4
EVERY_SEQUENCE, EVERY_LAYER = 6, 4  # a sample of about 11,000 tokens x 6 layers


@pytest.fixture(scope="module")
def sequences(shared: Path) -> list[list[list[int]]]:
    """[sequence * layer] lookups in rank order, every layer of a sequence on its own."""
    folder = shared / "traces" / "gpt-oss-20b"
    if not folder.is_dir():
        pytest.skip(f"no gpt-oss-20b traces in {folder}")
    lines = [json.loads(line) for line in (folder / "index.jsonl").open()]
    streams = []
    for number, line in enumerate(lines[::EVERY_SEQUENCE]):
        with np.load(folder / line["file"], allow_pickle=False) as file:
            ids = file[f"experts_{line['key']}"]
        assert ids.shape[1:] == (LAYERS, TOP_K)
        for layer in range(number % EVERY_LAYER, LAYERS, EVERY_LAYER):
            streams.append(ids[:, layer].ravel().tolist())
    return streams


@pytest.mark.parametrize(("slots", "known"), [(8, 0.615), (12, 0.782), (16, 0.884), (24, 0.965)])
def test_lru_hit_rates(sequences: list[list[int]], slots: int, known: float) -> None:
    """Cold start in every sequence, one lookup after another."""
    hits = lookups = 0
    for stream in sequences:
        state = new_state(1, EXPERTS, TOP_K, [slots])
        hits += replay_sequential(state, EVICTION["lru"].rule, stream).hits
        lookups += len(stream)
    assert lookups > 200_000
    assert hits / lookups == pytest.approx(known, abs=0.01)
