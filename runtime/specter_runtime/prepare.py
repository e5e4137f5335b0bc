"""From a loaded checkpoint to everything a session needs before it has a device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from specter_runtime.budget import Budget, Fixed, plan_budget
from specter_runtime.checkpoint import Checkpoint
from specter_runtime.codec import BaseName, Coding
from specter_runtime.draft_weights import DraftWeights
from specter_runtime.expectation import measured_expectation
from specter_runtime.host_experts import HostExperts
from specter_runtime.live_rules import (
    Policies,
    live_policies,
    live_rules,
    live_state,
    needs_popularity,
)
from specter_runtime.loaded_model import LoadedModel
from specter_runtime.options import SessionOptions
from specter_runtime.quantizer import DraftCode, parse
from specter_runtime.stored_form import as_stored
from specter_runtime.survey import Survey
from specter_sim.config import RunConfig
from specter_sim.hardware import Link
from specter_sim.offload.offloader import Rules
from specter_sim.policies.state import State
from specter_sim.setup.memory import machine_of, staging_slots
from specter_sim.setup.rules import Expectation
from specter_sim.setup.sources import named_trace
from specter_traces.errors import UsageError
from specter_traces.statistics import popularity

_BASES: dict[int | None, BaseName] = {2: "base2", 3: "base3", 4: "base4"}


@dataclass(frozen=True)
class Prepared:
    """A model whose experts have moved out, with a memory plan and its rules' beginnings."""

    loaded: LoadedModel
    config: RunConfig
    options: SessionOptions
    policies: Policies
    draft: DraftWeights | None
    budget: Budget
    popularity: NDArray[np.float64]
    notes: tuple[str, ...]

    @property
    def checkpoint(self) -> Checkpoint:
        """The loaded model."""
        return self.loaded.checkpoint

    @property
    def store(self) -> HostExperts:
        """The experts in host memory."""
        return self.loaded.store

    @property
    def survey(self) -> Survey:
        """What the model is like."""
        return self.loaded.survey

    @property
    def link(self) -> Link:
        """The link that an emulated device is paced to."""
        return machine_of(self.config).link

    @property
    def load_bytes(self) -> float:
        """Bytes of one load: a mean, where layers have experts of different sizes."""
        return self.store.load_bytes

    @property
    def speculates(self) -> bool:
        """Whether windows of more than one token are possible."""
        return self.draft is not None and not self.survey.obstacle

    def state(self) -> State:
        """The device before the first request."""
        groups, staging = self.budget.groups, staging_slots(self.config)
        top_k = self.survey.top_k
        return live_state(self.config, self.policies, groups, staging, top_k, self.popularity)

    def rules(self) -> Rules:
        """The rules; a governor's expectation is measured now."""

        def expect(most: int) -> Expectation:
            assert self.draft is not None
            load_s = self.link.copy_s(int(self.load_bytes))
            sources, top_k = self.draft.sources(), self.survey.top_k
            return measured_expectation(self.loaded.network, sources, top_k, load_s)(most)

        return live_rules(self.policies, int(self.load_bytes), expect)


def check_config(config: RunConfig) -> Policies:
    """The policies of a configuration that can run live; UsageError for one that cannot."""
    coding_of(config)
    return live_policies(config)


def coding_of(config: RunConfig) -> Coding | None:
    """How experts are coded; None for plain ones. UsageError for a form that cannot run."""
    experts = config.experts
    if experts.form == "plain":
        return None
    if experts.form == "coded":
        return Coding(None, experts.group_size)
    if experts.draft_bits not in _BASES:
        raise UsageError(
            f"a coded expert's base has 2, 3 or 4 bits, got {experts.draft_bits}: set "
            'experts.draft_bits to one of them, or experts.form = "plain"'
        )
    return Coding(_BASES[experts.draft_bits], experts.group_size)


def prepare(checkpoint: Checkpoint, config: RunConfig, options: SessionOptions) -> Prepared:
    """Move the experts of a loaded model into a store and plan its memory.

    A checkpoint with coded experts runs with them, unless `config` asks for another coding.
    UsageError for a configuration that cannot run, or a budget that is too small.
    """
    config = as_stored(checkpoint, config)
    drafts, coding = check_config(config).drafts, coding_of(config)
    code = draft_code(config, options) if drafts else None
    return plan(LoadedModel.take(checkpoint, code, coding), config, options)


def plan(loaded: LoadedModel, config: RunConfig, options: SessionOptions) -> Prepared:
    """Plan the memory of a model whose experts are in a store already; errors as `prepare`."""
    policies, found, name = check_config(config), loaded.survey, loaded.checkpoint.name
    if loaded.coding != coding_of(config):
        raise UsageError(
            f"the experts of {name} were loaded in another form than experts.form = "
            f'"{config.experts.form}": load the model again'
        )
    wanted = policies.drafts
    if found.obstacle:
        policies = policies.without_draft()
    _check_layers(config, policies, loaded.store, name)
    draft = None
    if policies.drafts:
        draft = loaded.draft(draft_code(config, options))
    fixed = _fixed(loaded, draft, policies, options)
    budget = plan_budget(config.memory, loaded.store, fixed, found.top_k, name)
    notes = [_obstacle_note(found)] if wanted and found.obstacle else []
    if options.lock_bytes is not None:
        notes.append(_lock(loaded.store, options.lock_bytes))
    popular = _popularity(config, policies, loaded.store, name)
    return Prepared(loaded, config, options, policies, draft, budget, popular, tuple(notes))


def draft_code(config: RunConfig, options: SessionOptions) -> DraftCode:
    """The code of a configuration's draft; UsageError when it has none."""
    coding = coding_of(config)
    if coding is not None and coding.draft_code is not None:
        return coding.draft_code
    bits = config.experts.draft_bits
    if bits is None and options.draft is None:
        raise UsageError(
            f'depth "{config.policy.depth}" needs a draft: set experts.draft_bits to 2, 3, 4 or 8'
        )
    name = options.draft or ("int8" if bits == 8 else f"base{bits}")
    return parse(name, config.experts.group_size)


def _fixed(
    loaded: LoadedModel, draft: DraftWeights | None, policies: Policies, options: SessionOptions
) -> Fixed:
    found, deepest = loaded.survey, policies.deepest if draft is not None else 0
    context = options.context_tokens + deepest + 1
    widest = context if found.obstacle else max(options.chunk_tokens, deepest + 1)
    scratch = _activation_bytes(loaded, widest, context, deepest + 1)
    return Fixed(
        dense_bytes=found.dense_bytes,
        draft_bytes=loaded.base_bytes or (0 if draft is None else draft.nbytes),
        kv_bytes=found.kv_bytes(context),
        scratch_bytes=scratch
        + loaded.store.scratch_bytes
        + (0 if draft is None else draft.scratch_bytes),
        context_tokens=options.context_tokens,
    )


def _activation_bytes(loaded: LoadedModel, tokens: int, context: int, verified: int) -> int:
    """Activations of the widest pass: hidden states, a dense layer's, the experts', the logits."""
    model, store, top_k = loaded.checkpoint.model, loaded.store, loaded.survey.top_k
    text = model.config.get_text_config()
    hidden, vocabulary = int(text.hidden_size), int(text.vocab_size)
    rows = [int(weight.shape[0]) for weight in model.parameters() if weight.ndim == 2]
    widest = max((count for count in rows if count != vocabulary), default=hidden)
    expert = max(sum(max(part.shape) for part in parts) for parts in store.parts)
    size = model.dtype.itemsize
    per_token = 8 * hidden + 3 * min(widest, 8 * hidden) + top_k * (hidden + expert)
    return (
        tokens * per_token * size
        + tokens * context * _attention_bytes(model)
        + verified * vocabulary * (size + 4)
    )


def _attention_bytes(model: PreTrainedModel) -> int:
    """Bytes for each query and key that attention keeps: scores of all heads where nothing is
    fused, else a mask.
    """
    text = model.config.get_text_config()
    if text._attn_implementation != "eager":
        return 1 + model.dtype.itemsize
    return 3 * int(text.num_attention_heads) * model.dtype.itemsize


def _check_layers(config: RunConfig, policies: Policies, store: HostExperts, name: str) -> None:
    if len(set(store.experts)) == 1:
        return
    if policies.streams or config.memory.initial != "cold":
        raise UsageError(
            f"the MoE layers of {name} have {sorted(set(store.experts))} experts: streaming whole "
            'layers and initial residents need equal layers; set memory.initial = "cold" and '
            "another prefetch"
        )


def _popularity(
    config: RunConfig, policies: Policies, store: HostExperts, name: str
) -> NDArray[np.float64]:
    """Uses of every expert in the configured trace where a rule needs them, else zeros: [L, E]."""
    shape = (store.layers, max(store.experts))
    wanting = needs_popularity(config, policies)
    if not wanting:
        return np.zeros(shape)
    uses = popularity(named_trace(config.trace.path, config.experts.draft_bits))
    if uses.shape != shape:
        raise UsageError(
            f"{wanting} needs to know which experts of {name} are popular, and trace "
            f'"{config.trace.path}" is of {uses.shape[0]} x {uses.shape[1]} experts, not '
            f"{shape[0]} x {shape[1]}: capture a trace of this model and give trace.path"
        )
    return uses


def _obstacle_note(found: Survey) -> str:
    return (
        f"no speculation: the cache cannot be rolled back ({found.obstacle}), so proposals could "
        "not be taken back; decoding at depth 0"
    )


def _lock(store: HostExperts, limit_bytes: int) -> str:
    locked = store.lock_pages(limit_bytes)
    share = locked / store.nbytes
    return f"{share:.0%} of the experts' host memory is page-locked ({locked} B)"
