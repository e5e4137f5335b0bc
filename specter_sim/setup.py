"""Turn a configuration into everything a run needs: trace, shape, machine, costs, memory, rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from specter_sim.config import RunConfig
from specter_sim.hardware import (
    Costs,
    ExpertBytes,
    ExpertForm,
    Machine,
    MemoryPlan,
    ModelShape,
    SlotLayout,
    build_costs,
    expert_bytes,
    find_machine,
    find_model,
    host_note,
    plan_for_budget,
    plan_for_slots,
)
from specter_sim.names import suggestion
from specter_sim.offload.offloader import Rules
from specter_sim.policies import governor, paper_planner
from specter_sim.policies.catalogue import (
    DEPTH,
    EVICTION,
    PREFETCH,
    DepthInfo,
    EvictionInfo,
    PolicyInfo,
    PrefetchInfo,
    Scalar,
)
from specter_sim.policies.state import RESIDENT, State, new_state
from specter_traces import Trace, bundled, bundled_names, load
from specter_traces.errors import UsageError
from specter_traces.statistics import popularity as popularity_by_layer
from specter_traces.statistics import union_growth
from specter_traces.synthesize import synthesize, with_assumed_draft

P = TypeVar("P", bound=PolicyInfo)

BUNDLED_FAMILY = "tiny-moe"
LEAST_TOKENS_PER_REQUEST = 64
DEFAULT_ASSUMED = 0.9


@dataclass(frozen=True)
class Request:
    """One sequence to serve: prompt positions, where decoding starts, and where it ends."""

    begin: int
    prompt_tokens: int
    context: int  # KV tokens before ``begin``
    start: int
    last: int


@dataclass(frozen=True)
class Setup:
    """A resolved run. Immutable; every run builds its own state from it."""

    config: RunConfig
    trace: Trace
    requests: tuple[Request, ...]
    shape: ModelShape
    machine: Machine
    costs: Costs
    plan: MemoryPlan
    slots: tuple[int, ...]
    eviction: EvictionInfo
    prefetch: PrefetchInfo
    depth: DepthInfo
    params: Mapping[str, Mapping[str, Scalar]]
    accepted: NDArray[np.bool_]
    hot: NDArray[np.int64]
    popularity: NDArray[np.float64]
    rules: Rules
    notes: tuple[str, ...]

    @property
    def demand_all(self) -> bool:
        """Whether layers are streamed whole, needed or not."""
        return self.prefetch.name == "stream"

    def new_state(self, position: int = 0) -> State:
        """A fresh device with the configured initial residents; what follows is at ``position``."""
        params = {**self.params["prefetch"], **self.params["eviction"]}
        future = self.eviction.needs | self.prefetch.needs
        know = "future" in future
        state = new_state(
            self.shape.moe_layers,
            self.shape.num_experts,
            self.shape.top_k,
            self.slots,
            staging_slots=staging_slots(self.config),
            decay=float(params.get("decay", 0.9)),
            forget=bool(params.get("forget", False)),
            seed=int(params.get("seed", self.config.trace.seed)),
            hot=self.hot.tolist(),
            future=self._future() if self.eviction.name == "belady" else None,
            position=position,
            routes_ahead=flat_routes(self.trace) if self.prefetch.name == "oracle" else (),
            accepted_run=self._accepted_run() if know else (),
        )
        self._fill(state)
        return state

    def _future(self) -> tuple[list[int], list[int]]:
        return future_uses(self.trace, self.requests)

    def _accepted_run(self) -> list[int]:
        from specter_sim.sim.traced_model import accepted_runs

        return accepted_runs(self.accepted.tolist(), self.trace.sequence_offsets.tolist())

    def _fill(self, s: State) -> None:
        """Place the initial residents, layer by layer, into the layer's slots or even share."""
        initial = self.config.memory.initial
        if initial == "cold" and not self.hot.any():
            return
        for layer in range(s.layers):
            group = layer if s.groups > 1 or s.layers == 1 else 0
            share = self.slots[group] // (1 if s.groups > 1 else s.layers)
            for expert in self._initial_of(layer, share):
                place(s, group, layer * s.experts + expert)

    def _initial_of(self, layer: int, share: int) -> list[int]:
        experts = self.shape.num_experts
        if self.config.memory.initial == "highest":
            return list(range(experts - share, experts))
        if self.config.memory.initial == "popular":
            return most_popular(self.popularity[layer], share)
        begin = layer * experts
        members: list[int] = np.flatnonzero(self.hot[begin : begin + experts]).tolist()
        return members


def most_popular(uses: NDArray[np.float64], count: int) -> list[int]:
    """The ``count`` most used experts of a layer; ties go to the lower id."""
    order: list[int] = np.argsort(-uses, kind="stable")[:count].tolist()
    return order


def place(s: State, group: int, index: int) -> None:
    """Make an expert resident before the run starts."""
    if s.free[group] == 0:
        return
    slot = s.slot_begin[group + 1] - s.free[group]
    s.occupant[slot], s.slot_of[index], s.residency[index] = index, slot, RESIDENT
    s.free[group] -= 1


def staging_slots(config: RunConfig) -> int:
    """Transient slots of the demand policy."""
    return config.memory.staging_slots if config.policy.demand == "staging" else 0


def resolve(config: RunConfig) -> Setup:
    """Load and check everything a configuration names. Raises UsageError on the impossible."""
    eviction, prefetch, depth = policies_of(config)
    params = {
        "eviction": params_of(eviction, config.policy.eviction_params),
        "prefetch": params_of(prefetch, config.policy.prefetch_params),
        "depth": params_of(depth, depth_params(config)),
    }
    shape = find_model(config.model)
    machine = machine_of(config)
    drafts = depth.name != "never" and params["depth"].get("depth") != 0
    check_policies(config, eviction, prefetch, drafts)
    trace, others, notes = trace_of(config, shape, drafts)
    check_trace(config, trace, shape, prefetch, drafts)
    form = ExpertForm(config.experts.form)
    bits = draft_bits(config, drafts)
    sizes = expert_bytes(shape, form, bits, config.experts.group_size)
    plan = memory_plan(config, shape, machine, sizes)
    slots = slot_counts(config, shape, plan)
    check_slots(config, shape, plan)
    costs = build_costs(
        shape,
        machine,
        form,
        bits,
        config.experts.grouped,
        config.experts.group_size,
        grouped_draft=config.experts.grouped_draft,
        captured_draft=config.experts.captured_draft,
    )
    popularity = popularity_by_layer(others if others is not None else trace)
    hot = hot_set(prefetch, eviction, params["eviction"], popularity, shape, slots)
    rules = Rules(
        eviction.rule,
        prefetch.rule,
        depth.rule,
        prefetch_memory(prefetch, params["prefetch"], costs),
        depth_memory(depth, params["depth"], trace, shape, machine, costs, config),
    )
    notes += tuple(text for text in (sizes.note, host_note(plan, machine.host)) if text)
    return Setup(
        config,
        trace,
        requests_of(config, trace),
        shape,
        machine,
        costs,
        plan,
        slots,
        eviction,
        prefetch,
        depth,
        params,
        accepted_of(config, trace),
        hot,
        popularity,
        rules,
        notes,
    )


# --- policies -------------------------------------------------------------------------------------


def policies_of(config: RunConfig) -> tuple[EvictionInfo, PrefetchInfo, DepthInfo]:
    """The three policies by name; a number as depth means that fixed depth."""
    names = config.policy
    depth = "fixed" if names.depth.isdecimal() else names.depth
    return (
        named(EVICTION, names.eviction, "eviction"),
        named(PREFETCH, names.prefetch, "prefetch"),
        named(DEPTH, depth, "depth"),
    )


def named(known: Mapping[str, P], name: str, kind: str) -> P:
    """The policy of that name. Raises UsageError with the nearest."""
    if name not in known:
        raise UsageError(f'unknown {kind} policy "{name}": {suggestion(name, known)}')
    return known[name]


def depth_params(config: RunConfig) -> Mapping[str, Scalar]:
    """Depth parameters, with a depth given by number."""
    name, given = config.policy.depth, config.policy.depth_params
    return {**given, "depth": int(name)} if name.isdecimal() else given


def params_of(info: PolicyInfo, given: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Defaults overlaid with what was given. Raises UsageError for unknown or impossible ones."""
    values = {name: param.default for name, param in info.params.items()}
    for name, value in given.items():
        if name not in info.params:
            hint = suggestion(name, info.params) if info.params else "it takes none"
            raise UsageError(f'policy "{info.name}" has no parameter "{name}": {hint}')
        values[name] = checked(info, name, value)
    return values


def checked(info: PolicyInfo, name: str, value: Scalar) -> Scalar:
    """A parameter's value, of its type and in its range."""
    param = info.params[name]
    kind = type(param.default)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = isinstance(value, kind) or (kind is float and number)
    if not fits or (kind is not bool and isinstance(value, bool)):
        raise UsageError(f"{info.name}.{name} ({param.doc}) must be {kind.__name__}, got {value!r}")
    low = param.least is not None and number and value < param.least  # type: ignore[operator]
    high = param.most is not None and number and value > param.most  # type: ignore[operator]
    if low or high:
        most = "any" if param.most is None else param.most
        raise UsageError(
            f"{info.name}.{name} ({param.doc}) must lie in {param.least} .. {most}, got {value!r}"
        )
    return value


def check_policies(
    config: RunConfig, eviction: EvictionInfo, prefetch: PrefetchInfo, drafts: bool
) -> None:
    """Combinations that make no sense."""
    if "paired" in prefetch.needs and not drafts:
        raise UsageError(
            f'prefetch "{prefetch.name}" follows a draft, but depth is "{config.policy.depth}": '
            "choose a depth of at least 1, or another prefetch"
        )
    if config.policy.demand == "staging" and config.memory.staging_slots == 0:
        raise UsageError(
            "demand = staging needs transient slots: set memory.staging_slots to at least 1"
        )
    if prefetch.name == "stream" and config.memory.layout != "global":
        raise UsageError('prefetch "stream" moves whole layers: set memory.layout = "global"')


def prefetch_memory(
    info: PrefetchInfo, params: Mapping[str, Scalar], costs: Costs
) -> tuple[float, ...]:
    """What the prefetch rule starts a request with."""
    if info.name == "paper":
        return tuple(paper_planner.new_memory(float(costs.load_bytes)))
    return tuple(float(value) for name, value in params.items() if name != "decay")


def depth_memory(
    info: DepthInfo,
    params: Mapping[str, Scalar],
    trace: Trace,
    shape: ModelShape,
    machine: Machine,
    costs: Costs,
    config: RunConfig,
) -> tuple[float, ...]:
    """What the depth rule starts with."""
    if info.name != "governor":
        return (float(params.get("depth", 0)),)
    depths = range(int(params["most"]) + 1)
    unions = expected_unions(trace, depths)
    context = config.trace.context
    draft_s = [depth * costs.draft_step_s(context) for depth in depths]
    verify_s = [
        shape.moe_layers * costs.layer_s(depth + 1, context)
        + shape.moe_layers * costs.experts_s(round(unions[depth]), (depth + 1) * shape.top_k)
        + costs.fixed_s(depth + 1, context)
        for depth in depths
    ]
    demands = [shape.moe_layers * unions[depth] for depth in depths]
    load_s = costs.load_bytes / machine.link.bytes_per_s
    return tuple(governor.new_memory(draft_s, verify_s, demands, load_s, int(params["probe"])))


def expected_unions(trace: Trace, depths: Sequence[int]) -> list[float]:
    """Experts a layer needs for a window of each depth, measured on the trace."""
    growth = union_growth(trace, [depth + 1 for depth in depths]).mean(axis=1)
    longest = float(np.nanmax(growth))
    return [longest if np.isnan(union) else float(union) for union in growth]


# --- trace ----------------------------------------------------------------------------------------


def trace_of(
    config: RunConfig, shape: ModelShape, drafts: bool
) -> tuple[Trace, Trace | None, tuple[str, ...]]:
    """The served sequences, the sequences left over (None if none), and notes."""
    whole = whole_trace(config, shape)
    chosen = served_sequences(config, whole)
    rest = [i for i in range(whole.num_sequences) if i not in set(chosen)]
    trace = whole.select(chosen)
    others = whole.select(rest) if rest else None
    assumed = config.trace.assumed_acceptance, config.trace.assumed_recall
    if drafts and not trace.is_paired and assumed != (None, None):
        acceptance, recall = (DEFAULT_ASSUMED if value is None else value for value in assumed)
        trace = with_assumed_draft(trace, acceptance, recall, config.trace.seed)
    return trace, others, trace_notes(config, trace, drafts)


def trace_notes(config: RunConfig, trace: Trace, drafts: bool) -> tuple[str, ...]:
    """What a reader of the result must know about its trace."""
    notes, header = [], trace.header
    if header.synthetic:
        notes.append(f"synthetic routes, fitted to {header.synthesized_from or 'a real trace'}")
    if drafts and header.assumed_draft:
        notes.append("the draft is assumed, not recorded")
    if drafts and header.draft is not None and header.draft.bits != config.experts.draft_bits:
        notes.append(
            f"acceptance and draft routes are those of a {header.draft.bits}-bit draft, "
            f"bytes those of {config.experts.draft_bits} bits"
        )
    if not trace.prompt_lengths.any():
        notes.append("prompt routes were not recorded: TTFT leaves the prefill out")
    return tuple(notes)


def whole_trace(config: RunConfig, shape: ModelShape) -> Trace:
    """The trace a configuration names: bundled, synthesized to the model's shape, or a file."""
    path = config.trace.path
    bits = config.experts.draft_bits
    if path == "synth":
        return synthesized(
            bundled_by_bits(bits),
            shape.moe_layers,
            shape.num_experts,
            shape.top_k,
            max(512, 2 * config.trace.tokens),
            config.trace.seed,
        )
    if path == BUNDLED_FAMILY:
        return cached_bundled(bundled_by_bits(bits))
    if path in bundled_names():
        return cached_bundled(path)
    if not Path(path).exists():
        hint = suggestion(path, [BUNDLED_FAMILY, *bundled_names(), "synth"])
        raise UsageError(f'no bundled trace and no file is called "{path}": {hint}')
    return cached_file(path)


def bundled_by_bits(bits: int | None) -> str:
    """The bundled trace whose draft has that many bits, else the one with the most."""
    name = f"{BUNDLED_FAMILY}-base{bits}"
    return name if name in bundled_names() else f"{BUNDLED_FAMILY}-base4"


@lru_cache(maxsize=8)
def cached_bundled(name: str) -> Trace:
    """A bundled trace, mapped once a process."""
    return bundled(name)


@lru_cache(maxsize=8)
def cached_file(path: str) -> Trace:
    """A trace file, mapped once a process."""
    return load(path)


@lru_cache(maxsize=8)
def synthesized(
    source: str, layers: int, experts: int, top_k: int, tokens: int, seed: int
) -> Trace:
    """A synthetic trace of another shape, made once a process."""
    return synthesize(cached_bundled(source), layers, experts, top_k, tokens, seed)


def served_sequences(config: RunConfig, trace: Trace) -> list[int]:
    """Evenly spaced sequences, few enough that each decodes a useful stretch."""
    available = trace.num_sequences
    if config.trace.sequences is not None:
        available = min(available, config.trace.sequences)
    count = max(1, min(available, config.trace.tokens // LEAST_TOKENS_PER_REQUEST))
    return [i * available // count for i in range(count)]


def requests_of(config: RunConfig, trace: Trace) -> tuple[Request, ...]:
    """One request a sequence; the tokens are spread evenly and clipped to what was recorded."""
    share = -(-config.trace.tokens // trace.num_sequences)
    requests = []
    offsets, prompts = trace.sequence_offsets.tolist(), trace.prompt_lengths.tolist()
    described = trace.header.sequences
    for i, prompt in enumerate(prompts):
        begin, end = offsets[i], offsets[i + 1]
        prompt_tokens = max(0, prompt - 1)
        start = begin + prompt_tokens
        context = described[i].unrecorded_prompt_tokens if described else 0
        requests.append(Request(begin, prompt_tokens, context, start, min(end, start + share)))
    return tuple(request for request in requests if request.last > request.start)


def check_trace(
    config: RunConfig, trace: Trace, shape: ModelShape, prefetch: PrefetchInfo, drafts: bool
) -> None:
    """The trace must have the model's shape and what the policies need."""
    of_trace = (trace.num_layers, trace.num_experts, trace.top_k)
    of_model = (shape.moe_layers, shape.num_experts, shape.top_k)
    if of_trace != of_model:
        raise UsageError(
            f"trace {config.trace.path!r} has {of_trace[0]} layers x {of_trace[1]} experts, "
            f"top-{of_trace[2]}; {shape.name} has {of_model[0]} x {of_model[1]}, "
            f'top-{of_model[2]}: choose the model it was recorded from, or trace.path = "synth"'
        )
    if drafts and not trace.is_paired:
        raise UsageError(
            f"trace {config.trace.path!r} has no draft, and depth is "
            f'"{config.policy.depth}": set policy.depth = "never", or assume a draft with '
            "trace.assumed_acceptance"
        )
    if "gate" in prefetch.needs and trace.gate_ids is None:
        raise UsageError(
            f"trace {config.trace.path!r} has no next-layer-gate predictions: "
            "choose another prefetch, or capture them"
        )


def accepted_of(config: RunConfig, trace: Trace) -> NDArray[np.bool_]:
    """Whether the proposal after each position is kept: greedy agreement, or a seeded draw."""
    if not trace.is_paired:
        return np.zeros(trace.num_positions, dtype=np.bool_)
    mode = config.trace.acceptance
    if mode == "auto":
        mode = "greedy" if trace.header.decoding == "greedy" else "sampled"
    if mode == "greedy" and trace.draft_tokens is not None and trace.target_tokens is not None:
        return np.asarray(trace.draft_tokens == trace.target_tokens)
    if trace.accept_prob is None:
        raise UsageError(f"trace {config.trace.path!r} does not say what a draft would be accepted")
    draws = np.random.default_rng(config.trace.seed).random(trace.num_positions)
    return np.asarray(draws < trace.accept_prob.astype(np.float64))


def future_uses(trace: Trace, requests: Sequence[Request]) -> tuple[list[int], list[int]]:
    """When every expert is used: slices by flat index, and ascending positions.

    Only positions that are served count; a use that never comes would hold its expert for ever.
    """
    served = np.concatenate([np.arange(request.begin, request.last) for request in requests])
    flat = flat_index_array(trace)[served]
    positions = np.repeat(served, flat.shape[1])
    order = np.argsort(flat.ravel(), kind="stable")
    total = trace.num_layers * trace.num_experts
    counts = np.bincount(flat.ravel(), minlength=total)
    begin = np.concatenate([[0], np.cumsum(counts)])
    return begin.tolist(), positions[order].tolist()


def flat_routes(trace: Trace) -> list[int]:
    """The target's routes as flat indices, position by position."""
    routes: list[int] = flat_index_array(trace).ravel().tolist()
    return routes


def flat_index_array(trace: Trace) -> NDArray[np.int64]:
    """Flat indices of the target's routes, [T, L*K]."""
    first = trace.num_experts * np.arange(trace.num_layers, dtype=np.int64)
    flat = trace.target_ids.astype(np.int64) + first[None, :, None]
    return flat.reshape(len(flat), -1)


# --- hardware and memory --------------------------------------------------------------------------

_OVERRIDES = {
    "link_bandwidth": "link_bytes_per_s",
    "link_latency": "link_latency_s",
    "queue_depth": "link_queue_depth",
    "granularity": "link_granularity_bytes",
    "vram": "gpu_memory_bytes",
    "hbm_bandwidth": "gpu_hbm_bytes_per_s",
    "host_bandwidth": "host_memory_bytes_per_s",
    "host_memory": "host_memory_bytes",
    "launch": "gpu_launch_s",
}


def machine_of(config: RunConfig) -> Machine:
    """The named machine with the configuration's changes."""
    given = config.machine.model_dump()
    changes = {field: given[key] for key, field in _OVERRIDES.items() if given.get(key) is not None}
    return find_machine(config.machine.name).with_(**changes)


def draft_bits(config: RunConfig, drafts: bool) -> int | None:
    """Bits of the resident draft or base; None when nothing of the kind is on the device."""
    if config.experts.form == "coded-base":
        return config.experts.draft_bits
    if not drafts:
        return None
    if config.experts.draft_bits is None:
        raise UsageError(
            f'depth "{config.policy.depth}" needs a draft: set experts.draft_bits to 2, 3, 4 or 8'
        )
    return config.experts.draft_bits


def memory_plan(
    config: RunConfig, shape: ModelShape, machine: Machine, sizes: ExpertBytes
) -> MemoryPlan:
    """Slots from their number, a budget, or all of the machine's memory."""
    memory, context = config.memory, config.trace.context
    staged = staging_slots(config)
    unshared = shape.dense_bytes() if not config.experts.shared_draft and sizes.has_draft else 0
    if memory.slots is not None:
        if memory.slots > shape.num_experts:
            raise UsageError(
                f"{shape.name} has {shape.num_experts} experts a layer, got memory.slots = "
                f"{memory.slots}: at most all of them can be resident"
            )
        plan = plan_for_slots(shape, sizes, memory.slots * shape.moe_layers, context, staged)
    else:
        budget = memory.budget if memory.budget is not None else machine.gpu.memory_bytes
        layout = SlotLayout(memory.layout)
        plan = plan_for_budget(shape, sizes, budget - unshared, context, staged, layout)
    return replace(
        plan,
        draft_bytes=plan.draft_bytes + unshared,
        total_bytes=plan.total_bytes + unshared,
    )


def slot_counts(config: RunConfig, shape: ModelShape, plan: MemoryPlan) -> tuple[int, ...]:
    """Slots of each eviction group."""
    if config.memory.layout == "global":
        return (plan.slots,)
    return (plan.slots // shape.moe_layers,) * shape.moe_layers


def check_slots(config: RunConfig, shape: ModelShape, plan: MemoryPlan) -> None:
    """A layer that cannot hold one token's experts runs in rounds: only when asked for."""
    per_layer = plan.slots // shape.moe_layers
    if per_layer >= shape.top_k or config.memory.allow_rounds:
        return
    raise UsageError(
        f"{shape.name} needs {shape.top_k} slots a layer for one token, got {per_layer}: raise "
        "memory.slots or the budget, or set memory.allow_rounds = true to run a layer in rounds"
    )


def hot_set(
    prefetch: PrefetchInfo,
    eviction: EvictionInfo,
    params: Mapping[str, Scalar],
    popularity: NDArray[np.float64],
    shape: ModelShape,
    slots: Sequence[int],
) -> NDArray[np.int64]:
    """Flags [L*E] of the static hot set: popular experts, or the first layers when streaming."""
    flags = np.zeros((shape.moe_layers, shape.num_experts), dtype=np.int64)
    total = sum(slots)
    if prefetch.name == "stream":
        resident_layers = max(0, (total - 2 * shape.num_experts) // shape.num_experts)
        flags[:resident_layers] = 1
    elif eviction.name == "hot-lru":
        share = int(float(params["share"]) * total / shape.moe_layers)
        for layer in range(shape.moe_layers):
            flags[layer, most_popular(popularity[layer], share)] = 1
    return flags.ravel()
