"""Thousands of tokens over a link that fails on purpose: is any token wrong, does memory grow?

Copies come late, in another order, not at all or in part (with --check also damaged, and claiming
to be whole). Every text is compared with the one that the same system writes without faults.
Resident memory and live tensors are measured after every request.

    python benchmarks/fault_soak.py --tokens 10000 --json soak.json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specter_runtime.checkpoint import Checkpoint, open_checkpoint
from specter_runtime.devices import DeviceKind, Faults
from specter_runtime.loaded_model import LoadedModel
from specter_runtime.prepare import plan
from specter_runtime.prompts import encode, read_passages
from specter_runtime.session import Session, SessionOptions
from specter_sim.config import build, nest

SYSTEMS: dict[str, dict[str, Any]] = {
    "lru, on demand": {"policy.depth": 0},
    "lfu, gate": {"policy.eviction": "lfu", "policy.prefetch": "gate", "memory.layout": "global"},
    "continuous, depth 2": {"policy.depth": 2, "policy.prefetch": "continuous"},
    "late plan, depth 4, pool": {
        "policy.depth": 4,
        "policy.prefetch": "draft-late",
        "policy.eviction": "predicted",
        "memory.layout": "global",
    },
    "continuous, depth 8, staging": {
        "policy.depth": 8,
        "policy.prefetch": "continuous",
        "policy.demand": "staging",
        "memory.staging_slots": 2,
    },
}
"""Fixed depths only: a governor's windows follow the clock, and in BF16 ties follow the windows."""

LATE_S = 1e-3


@dataclass(frozen=True)
class Sample:
    """One request served: what it wrote, and memory after it."""

    system: str
    tokens_before: int
    tokens: int
    wrong_tokens: int
    failed_copies: int
    rss_bytes: int
    tensor_bytes: int


def rss_bytes() -> int:
    """Resident memory of this process. Linux only."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def tensor_bytes() -> int:
    """Bytes of all tensors made since the start that are alive, each memory counted once."""
    gc.collect()
    alive = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
    memory = (tensor.untyped_storage() for tensor in alive)
    return sum({one.data_ptr(): one.nbytes() for one in memory}.values())


def wrong_tokens(text: Sequence[int], reference: Sequence[int]) -> int:
    """Places where two texts differ, or where only one of them has a token."""
    differing = sum(mine != theirs for mine, theirs in zip(text, reference, strict=False))
    return differing + abs(len(text) - len(reference))


def growth(samples: Sequence[Sample], field: str, warm_up: int) -> float | None:
    """Bytes a 1,000 tokens: one slope over all systems, each with a level of its own.

    None when no system has served two requests after its first `warm_up`.
    """
    steps, levels = [], []
    for system in dict.fromkeys(sample.system for sample in samples):
        own = [sample for sample in samples if sample.system == system][warm_up:]
        if len(own) > 1:
            tokens = np.array([sample.tokens_before for sample in own], dtype=float)
            level = np.array([getattr(sample, field) for sample in own], dtype=float)
            steps.append(tokens - tokens.mean())
            levels.append(level - level.mean())
    if not steps:
        return None
    moved = np.concatenate(steps)
    return float(moved @ np.concatenate(levels) / (moved @ moved) * 1000)


class Soak:
    """One loaded model, served by every system in turn."""

    def __init__(self, checkpoint: Checkpoint, given: argparse.Namespace) -> None:
        checkpoint.model.generation_config.eos_token_id = None  # every text has its full length
        self.loaded = LoadedModel.take(checkpoint)
        self.prompts = prompts_of(checkpoint)
        self.samples: list[Sample] = []
        self.closed_bytes: list[int] = []
        self._given = given
        self._tokens = 0

    def run(self, system: str, requests: int) -> None:
        """Serve `requests` texts without faults, then the same ones with faults."""
        first = len(self.samples)
        texts = [self._prompt(first + number) for number in range(requests)]
        with self._session(system, None) as session:
            references = [self._text(session, prompt) for prompt in texts]
        with self._session(system, self._faults()) as session:
            for prompt, reference in zip(texts, references, strict=True):
                self._serve(system, session, prompt, reference)
        del session
        self.closed_bytes.append(tensor_bytes())

    def _serve(
        self, system: str, session: Session, prompt: list[int], reference: list[int]
    ) -> None:
        failed = session.device.failed_copies
        text = self._text(session, prompt)
        sample = Sample(
            system,
            self._tokens,
            len(text),
            wrong_tokens(text, reference),
            session.device.failed_copies - failed,
            rss_bytes(),
            tensor_bytes(),
        )
        self._tokens += len(text)
        self.samples.append(sample)
        print(line_of(sample), flush=True)

    def _text(self, session: Session, prompt: list[int]) -> list[int]:
        windows = session.generate(prompt, self._given.new_tokens)
        text = [token for window in windows for token in window]
        session.forget_requests()
        return text

    def _session(self, system: str, faults: Faults | None) -> Session:
        given = self._given
        half = max(self.loaded.store.experts) // 2
        settings = {"memory.slots": given.slots or half, "machine.link_bandwidth": given.link}
        options = SessionOptions(
            device=DeviceKind.IMMEDIATE if faults is None else DeviceKind.EMULATED,
            context_tokens=max(map(len, self.prompts)) + given.new_tokens,
            poison=True,
            check=given.check,
            faults=faults,
        )
        return Session(plan(self.loaded, build(nest(settings | SYSTEMS[system])), options))

    def _faults(self) -> Faults:
        share = self._given.share
        return Faults(
            late=share,
            reordered=2 * share,
            failed=share,
            partial=share,
            damaged=share if self._given.check else 0.0,
            late_s=LATE_S,
            seed=self._tokens,
        )

    def _prompt(self, number: int) -> list[int]:
        """Another prompt for every request: behind the last one, the first ones a token shorter."""
        shorter, place = divmod(number, len(self.prompts))
        prompt = self.prompts[place]
        return prompt[: max(1, len(prompt) - shorter)]


def prompts_of(checkpoint: Checkpoint) -> list[list[int]]:
    """The bundled prompts; for a model without a tokenizer, numbers."""
    if checkpoint.tokenizer is None:
        return [[(7 * place + 13 * number) % 64 for place in range(12)] for number in range(30)]
    return [encode(passage, checkpoint) for passage in read_passages("starters")]


def toy() -> Checkpoint:
    """A random model of 3 layers of 8 experts in BF16."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        norm_topk_prob=True,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    return Checkpoint("toy", model.eval(), None, "bfloat16", "")


def line_of(sample: Sample) -> str:
    """A row of the table."""
    return (
        f"{sample.tokens_before + sample.tokens:7}  {sample.system:30}"
        f"{sample.wrong_tokens:6}{sample.failed_copies:8}"
        f"{sample.rss_bytes / 1e6:11.1f}{sample.tensor_bytes / 1e6:11.2f}"
    )


def summary(soak: Soak, seconds: float, warm_up: int) -> dict[str, Any]:
    """What came out, as one document."""
    samples = soak.samples
    return {
        "model": soak.loaded.checkpoint.name,
        "tokens": sum(sample.tokens for sample in samples),
        "requests": len(samples),
        "wrong_tokens": sum(sample.wrong_tokens for sample in samples),
        "failed_copies_made_good": sum(sample.failed_copies for sample in samples),
        "rss_bytes_per_1000_tokens": growth(samples, "rss_bytes", warm_up),
        "tensor_bytes_per_1000_tokens": growth(samples, "tensor_bytes", warm_up),
        "tensor_bytes_between_systems": soak.closed_bytes,
        "seconds": seconds,
        "samples": [asdict(sample) for sample in samples],
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=10_000, help="in all")
    parser.add_argument("--new-tokens", type=int, default=200, help="of one request")
    parser.add_argument("--slots", type=int, help="a layer; default: half of its experts")
    parser.add_argument("--link", default="2 GB/s")
    parser.add_argument("--share", type=float, default=0.04, help="of copies hit by each fault")
    parser.add_argument("--check", action="store_true", help="damage copies, and check all")
    parser.add_argument("--warm-up", type=int, default=2, help="requests a system, not in slopes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--toy", action="store_true", help="a random toy instead of tiny-moe")
    parser.add_argument("--json", type=Path, help="file for the result")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every system, print the table and the sums; 1 when a token was wrong."""
    given = parse(arguments)
    torch.set_num_threads(given.threads)
    gc.freeze()  # what imports made need not be looked through after every request
    try:
        return soaked(given)
    finally:
        gc.unfreeze()


def soaked(given: argparse.Namespace) -> int:
    """As `main`."""
    soak = Soak(toy() if given.toy else open_checkpoint("tiny-moe"), given)
    requests = -(-given.tokens // (given.new_tokens * len(SYSTEMS)))
    print(f"{'tokens':>7}  {'system':30}{'wrong':>6}{'failed':>8}{'RSS MB':>11}{'tensor MB':>11}")
    began_s = time.monotonic()
    for system in SYSTEMS:
        soak.run(system, requests)
    found = summary(soak, time.monotonic() - began_s, given.warm_up)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))
    found.pop("samples")
    print(json.dumps(found))
    soak.loaded.close()
    return int(found["wrong_tokens"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
