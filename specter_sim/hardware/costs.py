"""What each operation of decoding costs on a machine, in closed form.

Every operation is a roofline: the slower of its arithmetic and its reads, plus a floor for its
kernel launches. A `Costs` holds nothing but scalars, so that a compiled engine can flatten it, and
its methods are a few arithmetic operations. Activations and the appended KV entries are small
beside weights and are not charged.
"""

import math
from dataclasses import dataclass

from specter_sim.hardware.forms import ExpertBytes, ExpertForm, expert_bytes
from specter_sim.hardware.machines import Gpu, Machine
from specter_sim.hardware.models import ModelShape

# Kernels of one forward's parts, as an unfused transformer issues them.
ATTENTION_KERNELS = 11  # 2 norms, 3 projections, rotation, cache, attention, output, 2 residuals
ROUTER_KERNELS = 3  # logits, top-k, order by expert
FFN_KERNELS = 3  # into the width, activation, back; a grouped launch does all its experts at once
END_KERNELS = 6  # embedding, last norm, head, argmax, acceptance, crop


def roofline_seconds(
    token_s: float,
    token_position_s: float,
    read_s: float,
    position_read_s: float,
    floor_s: float,
    local_share: float,
    local_window_tokens: float,
    tokens: int,
    context: int,
) -> float:
    """Seconds of the roofline with these fields: the one formula, for every engine."""
    seen = min(context, local_window_tokens)
    positions = context + local_share * (seen - context)
    arithmetic_s = tokens * (token_s + token_position_s * positions)
    return max(arithmetic_s, read_s + position_read_s * positions) + floor_s


def experts_seconds(
    route_s: float, use_s: float, each_s: float, group_s: float, experts: int, routes: float
) -> float:
    """Seconds of some experts over some routes: a roofline, and launches of each and of all."""
    return max(routes * route_s, experts * use_s) + experts * each_s + group_s


@dataclass(frozen=True)
class Roofline:
    """One operation's time as a function of its query tokens and the cached positions they see.

    Positions are charged up to the window in the local share of layers.
    """

    token_s: float  # arithmetic of one token
    token_position_s: float  # arithmetic of one token on one cached position
    read_s: float  # weights
    position_read_s: float  # KV entries of one cached position
    floor_s: float  # launches and synchronisation
    local_share: float
    local_window_tokens: float

    def seconds(self, tokens: int, context: int) -> float:
        """Seconds for `tokens` query tokens with `context` cached positions."""
        return roofline_seconds(
            self.token_s,
            self.token_position_s,
            self.read_s,
            self.position_read_s,
            self.floor_s,
            self.local_share,
            self.local_window_tokens,
            tokens,
            context,
        )


@dataclass(frozen=True)
class Costs:
    """Seconds of every operation of one model in one form on one machine, and its load sizes."""

    draft: Roofline
    layer: Roofline
    dense: Roofline  # all layers without experts
    end: Roofline  # embedding, head, acceptance
    route_s: float  # arithmetic of one token in one expert
    use_s: float  # read of one expert
    group_launch_s: float  # once a call; 0 unless grouped
    expert_launch_s: float  # once an expert; 0 when grouped
    expand_per_use_s: float  # turning a coded expert into 16-bit weights; part of experts_s
    expand_per_load_s: float  # work on the device when a load arrives; not part of experts_s
    load_bytes: int
    slot_bytes: int
    has_draft: bool

    def draft_step_s(self, context: int) -> float:
        """One draft forward of one token, all layers, ends and its wait; infinite if no draft."""
        return self.draft.seconds(1, context)

    def layer_s(self, tokens: int, context: int) -> float:
        """One MoE layer without its routed experts over `tokens`: attention, norms, router,
        shared experts, and the wait that brings the routes to the host.
        """
        return self.layer.seconds(tokens, context)

    def experts_s(self, experts: int, routes: float) -> float:
        """Apply `experts` resident experts to `routes` token-expert pairs; 0 for no experts.

        Includes `expand_per_use_s` of each. One grouped launch, or one launch of three kernels an
        expert.
        """
        if experts == 0:
            return 0.0
        each_s = self.expert_launch_s + self.expand_per_use_s
        return experts_seconds(
            self.route_s, self.use_s, each_s, self.group_launch_s, experts, routes
        )

    def fixed_s(self, tokens: int, context: int) -> float:
        """Once a target forward over `tokens`: embedding, layers without experts, head over all
        of them, acceptance, and the wait that brings its outcome to the host.
        """
        return self.dense.seconds(tokens, context) + self.end.seconds(tokens, context)

    def prompt_s(self, tokens: int, context: int) -> float:
        """The same for a prompt, of which only the last token goes through the head."""
        return self.dense.seconds(tokens, context) + self.end.seconds(1, context)


def build_costs(
    shape: ModelShape,
    machine: Machine,
    form: ExpertForm,
    draft_bits: int | None,
    grouped: bool = True,
    group_size: int = 128,
    as_16bit: bool = False,
    grouped_draft: bool = True,
    captured_draft: bool = True,
) -> Costs:
    """The costs of `shape` on `machine` with experts in `form`.

    `grouped` and `grouped_draft` say whether target and draft apply all experts of a layer in one
    grouped launch or each in a launch of its own; `captured_draft` whether a draft forward is one
    captured graph. Raises UsageError as `expert_bytes` does.
    """
    sizes = expert_bytes(shape, form, draft_bits, group_size, as_16bit)
    gpu = machine.gpu
    launch_s = FFN_KERNELS * gpu.launch_s
    return Costs(
        draft=_draft(shape, gpu, sizes, grouped_draft, captured_draft),
        layer=_layer(shape, gpu),
        dense=_dense(shape, gpu),
        end=_end(shape, gpu),
        route_s=2 * shape.expert_params / gpu.compute_flops_per_s,
        use_s=sizes.read_per_use / gpu.read_bytes_per_s,
        group_launch_s=launch_s if grouped else 0.0,
        expert_launch_s=0.0 if grouped else launch_s,
        expand_per_use_s=sizes.expanded / gpu.expand_bytes_per_s,
        expand_per_load_s=0.0,
        load_bytes=sizes.per_load,
        slot_bytes=sizes.per_slot,
        has_draft=sizes.has_draft,
    )


def _layer(shape: ModelShape, gpu: Gpu) -> Roofline:
    params = _layer_params(shape)
    weights = _layer_bytes(shape)
    floor_s = _layer_kernels(shape) * gpu.launch_s + gpu.sync_s
    return _roofline(shape, gpu, params, weights, 1, floor_s)


def _dense(shape: ModelShape, gpu: Gpu) -> Roofline:
    kernels = shape.dense_layers * (ATTENTION_KERNELS + FFN_KERNELS)
    params, weights = _dense_params(shape), _dense_bytes(shape)
    return _roofline(shape, gpu, params, weights, shape.dense_layers, kernels * gpu.launch_s)


def _end(shape: ModelShape, gpu: Gpu) -> Roofline:
    floor_s = END_KERNELS * gpu.launch_s + gpu.sync_s
    return _roofline(shape, gpu, _head_params(shape), shape.head_read_bytes(), 0, floor_s)


def _draft(
    shape: ModelShape, gpu: Gpu, sizes: ExpertBytes, grouped: bool, captured: bool
) -> Roofline:
    routes = shape.moe_layers * shape.top_k
    params = (
        shape.moe_layers * _layer_params(shape)
        + _dense_params(shape)
        + _head_params(shape)
        + routes * shape.expert_params
    )
    weights = (
        shape.moe_layers * _layer_bytes(shape)
        + _dense_bytes(shape)
        + shape.head_read_bytes()
        + routes * sizes.read_per_draft_use
    )
    expert_kernels = FFN_KERNELS if grouped else FFN_KERNELS * shape.top_k
    kernels = _fixed_kernels(shape) + shape.moe_layers * (_layer_kernels(shape) + expert_kernels)
    launch_s = gpu.graph_launch_s if captured else gpu.launch_s
    floor_s = kernels * launch_s + gpu.sync_s if sizes.has_draft else math.inf
    return _roofline(shape, gpu, params, weights, shape.num_layers, floor_s)


def _roofline(
    shape: ModelShape, gpu: Gpu, params: int, weight_bytes: int, layers: int, floor_s: float
) -> Roofline:
    """A roofline over `params` weights and the attention of `layers` layers."""
    kv_bytes = shape.kv_bytes_per_token / shape.num_layers
    return Roofline(
        token_s=2 * params / gpu.compute_flops_per_s,
        token_position_s=layers * shape.attention_flops_per_position / gpu.compute_flops_per_s,
        read_s=weight_bytes / gpu.read_bytes_per_s,
        position_read_s=layers * kv_bytes / gpu.read_bytes_per_s,
        floor_s=floor_s,
        local_share=shape.local_layers / shape.num_layers,
        local_window_tokens=float(shape.local_window_tokens),
    )


def _layer_params(shape: ModelShape) -> int:
    return (
        shape.attention_params_per_layer
        + shape.router_params_per_layer
        + shape.shared_params_per_layer
    )


def _layer_bytes(shape: ModelShape) -> int:
    return (
        shape.attention_bytes_per_layer()
        + shape.router_bytes_per_layer()
        + shape.shared_bytes_per_layer()
    )


def _layer_kernels(shape: ModelShape) -> int:
    shared = FFN_KERNELS if shape.shared_params_per_layer else 0
    return ATTENTION_KERNELS + ROUTER_KERNELS + shared


def _fixed_kernels(shape: ModelShape) -> int:
    return END_KERNELS + shape.dense_layers * (ATTENTION_KERNELS + FFN_KERNELS)


def _dense_params(shape: ModelShape) -> int:
    return shape.dense_ffn_params + shape.dense_layers * shape.attention_params_per_layer


def _dense_bytes(shape: ModelShape) -> int:
    return shape.dense_ffn_bytes() + shape.dense_layers * shape.attention_bytes_per_layer()


def _head_params(shape: ModelShape) -> int:
    return shape.embedding_params if shape.tied_head else shape.head_params
