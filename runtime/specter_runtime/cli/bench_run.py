"""One row of a bench: a system that writes all prompts, and what that took."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specter_runtime.cli.opening import device_kind, load
from specter_runtime.cli.options import System, configuration, policy_name, today
from specter_runtime.cli.summary import stall_share
from specter_runtime.cli.systems import PLAIN
from specter_runtime.prompts import Passage, encode
from specter_runtime.sampling import Sampling
from specter_runtime.session import Session, SessionOptions
from specter_sim import __version__
from specter_sim.config import RunConfig, content_hash
from specter_traces.statistics import repeated_share


@dataclass(frozen=True)
class Work:
    """What every system writes."""

    passages: Sequence[Passage]
    source: str
    new_tokens: int
    sampling: Sampling | None

    def describe(self) -> str:
        """ "30 prompts of starters, 64 tokens each, greedy"."""
        texts = f"{len(self.passages)} prompts of {Path(self.source).name}"
        return f"{texts}, {self.new_tokens} tokens each, {self.drawn()}"

    def drawn(self) -> str:
        """How tokens are chosen."""
        return "greedy" if self.sampling is None else self.sampling.describe()


def key_of(system: System, config: RunConfig, work: Work) -> str:
    """Identity of a row: everything that its figures depend on, but the machine's mood."""
    texts = hashlib.sha256(repr(work.passages).encode()).hexdigest()
    told = (system.device, system.dtype, str(system.threads), str(work.new_tokens))
    return content_hash(config, texts, *told, repr(work.sampling), __version__)


def half_resident_bytes(system: System, work: Work) -> int:
    """Device bytes of half of the experts beside the rest, without a draft."""
    with _open(replace(system, policy=PLAIN), work)[0] as session:
        return session.budget.total_bytes


def measure(system: System, work: Work) -> dict[str, Any]:
    """The row of one system. UsageError when it cannot run in its memory."""
    session, prompts = _open(system, work)
    with session:
        texts = [_written(session, prompt, work, index) for index, prompt in enumerate(prompts)]
        result = session.result()
        return {
            **about(system, session.prepared.config, work),
            **result.row(),
            "peak_device_bytes": session.peak_device_bytes,
            "repetition": float(np.mean([repeated_share(np.array(text)) for text in texts])),
            "stall_share": stall_share(result),
        }


def about(system: System, config: RunConfig, work: Work) -> dict[str, Any]:
    """The part of a row that is known before it is run."""
    import torch

    from specter_sim.setup.memory import machine_of

    emulated = system.device == "emulated"
    return {
        "key": key_of(system, config, work),
        "date": today(),
        "policy": system.policy or policy_name(system, config),
        "model": config.model,
        "device": system.device,
        "link_bytes_per_s": machine_of(config).link.bytes_per_s if emulated else None,
        "budget_bytes": config.memory.budget,
        "prompts": work.source,
        "sequences": len(work.passages),
        "new_tokens": work.new_tokens,
        "sampling": work.drawn(),
        "threads": torch.get_num_threads(),
    }


def _open(system: System, work: Work) -> tuple[Session, list[list[int]]]:
    config = configuration(system)
    checkpoint = load(system, config.model, quiet=True)
    prompts = [encode(passage, checkpoint) for passage in work.passages]
    options = SessionOptions(
        system.dtype,
        device_kind(system),
        context_tokens=max(map(len, prompts)) + work.new_tokens,
    )
    return Session.of(checkpoint, config, options), prompts


def _written(session: Session, prompt: list[int], work: Work, index: int) -> list[int]:
    drawn = work.sampling and replace(work.sampling, seed=work.sampling.seed + index)
    return [
        token for window in session.generate(prompt, work.new_tokens, drawn) for token in window
    ]
