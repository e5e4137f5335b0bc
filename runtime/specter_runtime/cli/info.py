"""`specter-run info`: what a model takes, and what fits where. Nothing is generated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from specter_runtime.cli.options import (
    ConfigOption,
    DepthOption,
    DraftBitsOption,
    DtypeOption,
    JsonOption,
    ModelArgument,
    PolicyOption,
    SetOption,
    SlotsOption,
    System,
    VramOption,
    check_count,
    configuration,
    policy_name,
    print_json,
    today,
)
from specter_traces.errors import UsageError

if TYPE_CHECKING:
    from specter_runtime.prepare import Prepared
    from specter_sim.config import RunConfig

_CONTEXT_TOKENS = 1024
_SIZES = (
    "dense_bytes",
    "draft_bytes",
    "kv_token_bytes",
    "kv_bytes",
    "scratch_bytes",
    "host_bytes",
    "smallest_budget_bytes",
    "all_resident_bytes",
)


def info(
    model: ModelArgument = None,
    vram: VramOption = None,
    slots: SlotsOption = None,
    policy: PolicyOption = None,
    depth: DepthOption = None,
    draft_bits: DraftBitsOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    dtype: DtypeOption = "auto",
    context: Annotated[
        int, typer.Option(help="Longest text, prompt included, that KV is planned for.")
    ] = _CONTEXT_TOKENS,
    as_json: JsonOption = False,
) -> None:
    """Say what a model takes, what fits, and the smallest budget that works."""
    check_count("--context", context)
    system = System(
        model,
        config,
        policy,
        vram,
        slots,
        None,
        depth,
        draft_bits,
        tuple(settings or ()),
        "immediate",
        dtype,
    )
    told = _facts(system, configuration(system), context)
    if as_json:
        print_json(told)
    else:
        typer.echo(_table(told))


def _facts(system: System, config: RunConfig, context: int) -> dict[str, Any]:
    from specter_runtime.cli.opening import device_kind, load, set_threads
    from specter_runtime.prepare import check_config, prepare
    from specter_runtime.session import SessionOptions

    check_config(config)
    set_threads(system)
    checkpoint = load(system, config.model, keep_coded=True)
    options = SessionOptions(system.dtype, device_kind(system), context_tokens=context)
    prepared = prepare(checkpoint, _with_one_slot(config), options)
    about = {
        "date": today(),
        "model": checkpoint.name,
        "precision": checkpoint.precision,
        "policy": policy_name(system, config),
        "context_tokens": context,
    }
    return about | _sizes(prepared, config)


def _sizes(prepared: Prepared, config: RunConfig) -> dict[str, Any]:
    from specter_runtime.budget import smallest_budget
    from specter_sim.config import resolved

    fixed, store, found = prepared.budget.fixed, prepared.store, prepared.survey
    return {
        "moe_layers": store.layers,
        "experts": list(store.experts),
        "top_k": found.top_k,
        "dense_bytes": fixed.dense_bytes,
        "draft_bytes": fixed.draft_bytes,
        "kv_token_bytes": found.kv_token_bytes,
        "kv_bytes": fixed.kv_bytes,
        "scratch_bytes": fixed.scratch_bytes,
        "slot_bytes": list(store.expert_bytes),
        "host_bytes": store.nbytes,
        "smallest_budget_bytes": smallest_budget(config.memory, store, fixed, found.top_k),
        "all_resident_bytes": fixed.total_bytes + store.nbytes,
        "fit": _fit(prepared, config),
        "notes": list(prepared.notes),
        "config": resolved(config),
    }


def _with_one_slot(config: RunConfig) -> RunConfig:
    """The configuration with as little slot memory as there can be: none of it is looked at."""
    one = {"slots": 1, "slots_per_layer": None, "budget": None, "allow_rounds": True}
    return config.model_copy(update={"memory": config.memory.model_copy(update=one)})


def _fit(prepared: Prepared, config: RunConfig) -> dict[str, Any]:
    """How many slots the asked-for memory is, or why it is too little."""
    from specter_runtime.budget import plan_budget

    try:
        budget = plan_budget(
            config.memory,
            prepared.store,
            prepared.budget.fixed,
            prepared.survey.top_k,
            prepared.checkpoint.name,
        )
    except UsageError as error:
        return {"cap_bytes": config.memory.budget, "obstacle": str(error)}
    return {
        "cap_bytes": budget.cap_bytes,
        "slots": list(budget.groups),
        "resident_share": sum(budget.groups) / sum(prepared.store.experts),
        "total_bytes": budget.total_bytes,
    }


def _table(told: dict[str, Any]) -> str:
    from specter_runtime.cli.summary import block
    from specter_sim.units import format_bytes

    size = {
        key: format_bytes(value)
        for key, value in told.items()
        if key.endswith("_bytes") and isinstance(value, int)
    }
    draft = size["draft_bytes"] if told["draft_bytes"] else "none: this policy drafts nothing"
    lines = [
        ("model", f"{told['model']}, {told['precision']}: {_layers(told)}"),
        ("policy", str(told["policy"])),
        ("dense", f"{size['dense_bytes']}, attention, routers, shared experts, norms, head"),
        ("draft", draft),
        ("a slot", f"{_slot(told)}, one expert of one layer"),
        (
            "KV",
            f"{size['kv_token_bytes']} a token, {size['kv_bytes']} for {told['context_tokens']}",
        ),
        ("scratch", size["scratch_bytes"]),
        ("host", f"{size['host_bytes']}, every routed expert"),
        ("smallest", f"{size['smallest_budget_bytes']} is the smallest budget that works"),
        ("largest", f"{size['all_resident_bytes']} keeps every expert resident"),
        ("here", _fit_text(told["fit"])),
        *(("note", note) for note in told["notes"]),
    ]
    return block(lines)


def _layers(told: dict[str, Any]) -> str:
    return (
        f"{told['moe_layers']} MoE layers of {_range(told['experts'])} experts, top-{told['top_k']}"
    )


def _slot(told: dict[str, Any]) -> str:
    from specter_sim.units import format_bytes

    sizes = sorted({format_bytes(size) for size in told["slot_bytes"]})
    return sizes[0] if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"


def _range(counts: list[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def _fit_text(fit: dict[str, Any]) -> str:
    from specter_sim.units import format_bytes

    if "obstacle" in fit:
        return str(fit["obstacle"])
    slots = fit["slots"]
    each = f"a pool of {slots[0]} slots" if len(slots) == 1 else f"{_range(slots)} slots a layer"
    cap = fit["cap_bytes"]
    given = "without --vram" if cap is None else f"with --vram {format_bytes(cap)}"
    return (
        f"{given}: {each}, {100 * fit['resident_share']:.0f} % of the experts, "
        f"{format_bytes(fit['total_bytes'])} in all"
    )
