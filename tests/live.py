"""Live runs for tests: toy models and tiny-moe in a session, plain generation beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from toy_checkpoints import TOYS, make

from specter_runtime.checkpoint import Checkpoint, open_checkpoint
from specter_runtime.devices import DeviceKind
from specter_runtime.expert_store import ExpertStore
from specter_runtime.experts import install
from specter_runtime.session import Session, SessionOptions
from specter_sim.config import RunConfig, build, nest

PROMPT = [5, 17, 3, 44, 9, 61, 2, 30]


def toy_checkpoint(
    name: str = "qwen3-moe", seed: int = 0, dtype: torch.dtype = torch.float32
) -> Checkpoint:
    """A random toy model as if it had been loaded; it never ends its text."""
    model = make(TOYS[name], seed).to(dtype)  # type: ignore[arg-type]
    return Checkpoint(name, model, None, str(dtype).removeprefix("torch."), "")


def tiny_moe(dtype: str = "float32") -> Checkpoint:
    """The bundled model."""
    return open_checkpoint("tiny-moe", dtype)


def store_of(name: str = "qwen3-moe") -> ExpertStore:
    """The experts of a toy model in host memory."""
    return ExpertStore.take(install(make(TOYS[name])))


def config_of(**dotted: Any) -> RunConfig:
    """A configuration from keys with a double underscore for the dot."""
    return build(nest({key.replace("__", "."): value for key, value in dotted.items()}))


def session_of(
    checkpoint: Checkpoint, options: dict[str, Any] | None = None, **dotted: Any
) -> Session:
    """A session without pacing, with poisoned slots, unless `options` say otherwise."""
    given: dict[str, Any] = {"device": DeviceKind.IMMEDIATE, "poison": True, "context_tokens": 128}
    return Session.of(checkpoint, config_of(**dotted), SessionOptions(**(given | (options or {}))))


def text_of(
    session: Session, new_tokens: int, prompt: list[int] | None = None, **given: Any
) -> list[int]:
    """All tokens of a request."""
    parts = session.generate(PROMPT if prompt is None else prompt, new_tokens, **given)
    return [token for part in parts for token in part]


def plain_text(
    checkpoint: Checkpoint, new_tokens: int, prompt: list[int] | None = None
) -> list[int]:
    """What transformers itself generates, greedily. Call it before a session takes the experts."""
    prompt = PROMPT if prompt is None else prompt
    model: Any = checkpoint.model
    model.set_experts_implementation("eager")
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    text: list[int] = output[0, len(prompt) :].tolist()
    return text


def saved(folder: Path, name: str) -> Path:
    """A toy checkpoint on disk."""
    make(TOYS[name]).save_pretrained(folder)
    return folder
