"""BF16: a session's text leaves plain decoding only at a tie that window shapes alone would flip.

A pass over one token and a pass over a window round differently. Where the two best tokens are
closer than that difference, measured by transformers alone, either is right; anywhere else a
different token is a fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from architectures import ARCHITECTURES, CANNOT_SPECULATE, NEW_TOKENS, PROMPT, PlainText, decode
from lossless_cases import Case, config_of
from torch import Tensor
from toy_checkpoints import write
from transformers import PreTrainedModel

from specter_runtime.checkpoint import open_checkpoint
from specter_runtime.devices import DeviceKind
from specter_runtime.kv_cache import KvCache
from specter_runtime.session import Session, SessionOptions

WIDTH = 5
"""Tokens of the widest verify pass."""
SAMPLE = ("deepseek-v3", "gemma4", "gpt-oss", "lfm2-moe", "mixtral", "olmoe", "phimoe")


class Parting(NamedTuple):
    """Where two texts differ first: the place, how far plain decoding held its token above the
    other, and how much of that distance window shapes alone move."""

    place: int
    distance: float
    moved: float

    @property
    def is_tie(self) -> bool:
        """Whether the shapes of passes explain it."""
        return self.distance <= self.moved


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All toys that speculate by a flag, else some."""
    if "name" in metafunc.fixturenames:
        able = [name for name in ARCHITECTURES if name not in CANNOT_SPECULATE]
        everything = metafunc.config.getoption("--all-lossless")
        metafunc.parametrize("name", able if everything else SAMPLE)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Toys are too small for threads, which only wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def parting(model: PreTrainedModel, plain: PlainText, text: list[int]) -> Parting | None:
    """The first difference of `text` from plain decoding; None when there is none."""
    for place, (mine, other) in enumerate(zip(plain.tokens, text, strict=True)):
        if mine != other:
            distance = _distance(plain.logits[place], mine, other)
            known = [*PROMPT, *plain.tokens]
            shapes = [_in_windows(model, known, place, first) for first in range(1, WIDTH + 1)]
            moved = max(abs(distance - _distance(logits, mine, other)) for logits in shapes)
            return Parting(place, distance, moved)
    return None


def _distance(logits: Tensor, mine: int, other: int) -> float:
    return float(logits[mine].float() - logits[other].float())


def _in_windows(model: PreTrainedModel, known: list[int], place: int, first: int) -> Tensor:
    """Logits that choose the token at `place`, when windows of WIDTH follow one of `first`."""
    cache, begin, size = KvCache(model), 0, first
    wanted = len(PROMPT) + place - 1
    while True:
        with torch.inference_mode():
            logits = cache.forward(model, torch.tensor(known[begin : begin + size]))
        cache.keep(len(logits), len(logits))
        if wanted < begin + size:
            return logits[wanted - begin]
        begin, size = begin + size, WIDTH


def session_text(folder: Path, case: Case) -> list[int]:
    """What a BF16 session of the checkpoint in `folder` writes."""
    options = SessionOptions(
        dtype="bfloat16", device=DeviceKind.IMMEDIATE, context_tokens=96, poison=True
    )
    with Session.open(str(folder), config_of(case, folder), options) as session:
        return [token for part in session.generate(PROMPT, NEW_TOKENS) for token in part]


def test_bf16_text_parts_only_at_ties(name: str, tmp_path: Path) -> None:
    folder = write(ARCHITECTURES[name], tmp_path / name)
    model = open_checkpoint(str(folder), "bfloat16").model
    plain = decode(model)
    text = session_text(folder, Case(name, "continuous", WIDTH - 1, "half"))
    found = parting(model, plain, text)
    print(f"{name}: {found or 'the same text'}")  # shown by -rP
    assert found is None or found.is_tie


def test_a_wrong_token_is_no_tie(tmp_path: Path) -> None:
    """The rule must not excuse a fault: the same texts with one token replaced by the runner-up."""
    folder = write(ARCHITECTURES["olmoe"], tmp_path / "olmoe")
    model = open_checkpoint(str(folder), "bfloat16").model
    plain = decode(model)
    best = plain.logits.float().topk(2)
    clear = [int(place) for place in (best.values[:, 0] - best.values[:, 1] > 0.2).nonzero()]
    assert len(clear) > 20
    for place in clear[::8]:
        text = [*plain.tokens[:place], int(best.indices[place, 1]), *plain.tokens[place + 1 :]]
        found = parting(model, plain, text)
        assert found is not None and not found.is_tie
