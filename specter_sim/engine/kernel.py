"""The compiled driver: the decode loop, the link and the GPU as one loop over flat memory.

A second driver of the rules, not a second set of them: every decision is made by the functions of
``offload.schedule`` and ``policies``, in the order in which ``offload.decode`` asks for them. It
is admitted because its journal equals the SimPy world's, entry by entry.

``e`` is a block (``engine.block``): the fields of ``policies.state.State``, which the rules see,
and beside them those of the link, the costs, the text and the results.
"""

from __future__ import annotations

from typing import Any

from specter_sim.bound import count_least_loads
from specter_sim.engine import rules
from specter_sim.hardware.costs import experts_seconds, roofline_seconds
from specter_sim.offload import schedule
from specter_sim.policies.state import (
    ABSENT,
    DEMAND,
    DEMAND_LOADS,
    LOADING,
    PREFETCH_LOADS,
    PREFETCHING,
    RESIDENT,
)

Block = Any  # engine.block
Pointer = Any  # a flat array of a block

# clock
NOW, HEAD_DONE, HEAD_BEGAN, LINK_BUSY, DRAFT_S, COMPUTE_S, NUM_CLOCK = range(7)
# link
QUEUE_HEAD, QUEUED, NUM_LINK = range(3)
# stalls by cause, per request
DEMAND_STALL, LATE_STALL, JOIN_STALL, NUM_STALLS = range(4)
# columns of a request
BEGIN, PROMPT, CONTEXT, START, LAST, NUM_REQUEST = range(6)
# columns of a request's times
BEGAN_S, START_S, DRAFTED_S, COMPUTED_S, NUM_TIMES = range(5)
# journal calls
(
    BEGIN_REQUEST,
    BEGIN_WINDOW,
    BEGIN_PASS,
    DRAFTED,
    DEMAND_CALL,
    EXPERT_OF_DEMAND,
    HINT_OF_DEMAND,
    RELEASE,
    NEXT_LOAD,
    COPIED,
    MUST_JOIN,
    END_WINDOW,
    END_PASS,
) = range(13)
NOTE_INTS = 5

IDLE = 1e300  # no copy is under way


def note(e: Block, call: int, a: int, b: int, c: int, d: int, seconds: float) -> None:
    """Append one journal entry; a full journal drops it and only counts."""
    if e.note_room == 0:
        return
    place = e.note_count[0]
    if place < e.note_room:
        row = NOTE_INTS * place
        e.note_ints[row], e.note_ints[row + 1], e.note_ints[row + 2] = call, a, b
        e.note_ints[row + 3], e.note_ints[row + 4] = c, d
        e.note_seconds[place] = seconds
    e.note_count[0] = place + 1


def roof(r: Pointer, tokens: int, context: int) -> float:
    """Seconds of an operation, its roofline as an array of fields."""
    return roofline_seconds(r[0], r[1], r[2], r[3], r[4], r[5], r[6], tokens, context)


def fixed_seconds(e: Block, tokens: int, context: int) -> float:
    """What a target forward costs outside its MoE layers."""
    return float(roof(e.dense_roof, tokens, context) + roof(e.end_roof, tokens, context))


# --- time -----------------------------------------------------------------------------------------


def advance(e: Block, seconds: float) -> None:
    """Let time pass; copies that finish meanwhile feed the link again."""
    clock = e.clock
    until = clock[NOW] + seconds
    while clock[HEAD_DONE] < until:
        finish_head(e)
    clock[NOW] = until


def draft_for(e: Block, seconds: float) -> None:
    """The GPU drafts."""
    e.clock[DRAFT_S] += seconds
    if seconds > 0:
        advance(e, seconds)


def compute_for(e: Block, seconds: float) -> None:
    """The GPU works on the target."""
    e.clock[COMPUTE_S] += seconds
    if seconds > 0:
        advance(e, seconds)


def finish_head(e: Block) -> None:
    """The copy at the head of the link's queue is done: book it and pump."""
    clock, link = e.clock, e.link
    now = clock[HEAD_DONE]
    clock[NOW] = now
    head = link[QUEUE_HEAD]
    expert, slot = e.queue_expert[head], e.queue_slot[head]
    kind, victim = e.queue_kind[head], e.queue_victim[head]
    seconds = now - clock[HEAD_BEGAN]
    clock[LINK_BUSY] += seconds
    link[QUEUE_HEAD] = wrapped(e, head + 1)
    link[QUEUED] -= 1
    clock[HEAD_DONE] = IDLE
    schedule.copied(e, expert, kind)
    rules.copied(e, e.prefetch_rule, e.prefetch_memory, kind, seconds)
    note(e, COPIED, expert, slot, kind, victim, seconds)
    pump(e)
    if link[QUEUED] > 0:
        serve_head(e)


def wrapped(e: Block, place: int) -> int:
    """A place in the ring of the link's queue, at most one round too far; a division is slow."""
    return place - int(e.queue_depth) if place >= e.queue_depth else place


def serve_head(e: Block) -> None:
    """Begin the copy at the head: its latency ran from its submission."""
    clock = e.clock
    now = clock[NOW]
    clock[HEAD_BEGAN] = now
    ready = e.queue_submitted[e.link[QUEUE_HEAD]] + e.latency_s
    if ready > now:
        now = now + (ready - now)
    done = now + e.copy_s
    if e.pieces_s > 0:
        done = done + e.pieces_s
    clock[HEAD_DONE] = done


def submit(e: Block, expert: int, slot: int, kind: int, victim: int) -> None:
    """Queue a load on the link."""
    place = wrapped(e, e.link[QUEUE_HEAD] + e.link[QUEUED])
    e.queue_expert[place], e.queue_slot[place] = expert, slot
    e.queue_kind[place], e.queue_victim[place] = kind, victim
    e.queue_submitted[place] = e.clock[NOW]
    e.link[QUEUED] += 1


def pump(e: Block) -> None:
    """Keep the link fed."""
    while e.link[QUEUED] < e.queue_depth:
        if schedule.wants_nothing(e):  # asking would say so too, but takes longer
            note(e, NEXT_LOAD, -1, -1, DEMAND, -1, 0.0)
            return
        load = rules.next_load(e, e.eviction_rule)
        note(e, NEXT_LOAD, load[0], load[1], load[2], load[3], 0.0)
        if load[0] < 0:
            return
        submit(e, load[0], load[1], load[2], load[3])


def pump_idle(e: Block) -> None:
    """Pump from outside a completion; an idle link starts at once."""
    idle = e.link[QUEUED] == 0
    pump(e)
    if idle and e.link[QUEUED] > 0:
        serve_head(e)


def stall(e: Block) -> float:
    """Wait for the next copy; returns the seconds it took."""
    began = e.clock[NOW]
    finish_head(e)
    pump_idle(e)
    return float(e.clock[NOW] - began)


# --- one pass -------------------------------------------------------------------------------------


def union_of(e: Block, position: int, tokens: int, layer: int) -> int:
    """Write the ascending union of a window's routes to ``e.union``; returns its size."""
    if tokens > 1:
        return merge(e, e.target, position, tokens, layer, e.union)
    row = (position * e.layers + layer) * e.top_k
    for rank in range(e.top_k):
        e.union[rank] = e.target[row + rank]
    return int(e.top_k)


def merge(e: Block, rows: Pointer, position: int, tokens: int, layer: int, out: Pointer) -> int:
    """Ascending ids that ``rows`` [T, L, K] has for a layer of a window, each once."""
    for place in range(position, position + tokens):
        row = (place * e.layers + layer) * e.top_k
        for rank in range(e.top_k):
            e.mark[rows[row + rank]] = 1
    size = 0
    for expert in range(e.experts):
        out[size] = expert  # overwritten unless it is marked: no branch to guess
        size += e.mark[expert]
        e.mark[expert] = 0
    return int(size)


def run_layers(e: Block, position: int, tokens: int, cached: int, request: int) -> int:
    """One target pass through the MoE layers; returns the experts demanded."""
    layer_s = roof(e.layer_roof, tokens, cached + tokens)
    demands = 0
    for layer in range(e.layers):
        compute_for(e, layer_s)
        demands += verify_layer(e, position, tokens, layer, request)
    return demands


def verify_layer(e: Block, position: int, tokens: int, layer: int, request: int) -> int:
    """Run whatever is resident; stall only when nothing is. Returns the experts demanded."""
    union = union_of(e, position, tokens, layer)
    waiting = demand(e, position, tokens, layer, union)
    demands, pending = waiting, mark_pending(e, layer, waiting)
    pump_idle(e)
    while waiting > 0:
        ready = find_ready(e, layer, waiting)
        if ready == 0:
            cause = LATE_STALL if pending > 0 else DEMAND_STALL
            e.stall_s[request * NUM_STALLS + cause] += stall(e)
            continue
        run(e, tokens, ready, union)
        for place in range(ready):
            index = layer * e.experts + e.ready[place]
            schedule.release(e, index)
            note(e, RELEASE, index, 0, 0, 0, 0.0)
            pending -= e.pending[e.ready[place]]
        waiting = drop_ready(e, waiting, ready)
        pump_idle(e)
    return demands


def demand(e: Block, position: int, tokens: int, layer: int, union: int) -> int:
    """Tell the schedule what a layer needs; returns how many experts are awaited."""
    waiting = e.experts if e.demand_all == 1 else union
    for place in range(waiting):
        e.waiting[place] = place if e.demand_all == 1 else e.union[place]
    if e.grouped == 0:
        schedule.put_hits_first(e, layer, e.waiting, waiting)
    hinted = 0
    if e.use_gate == 1 and layer + 1 < e.layers:
        hinted = merge(e, e.gate, position, tokens, layer + 1, e.gate_hints)
    schedule.demand(e, layer, e.waiting, waiting, e.gate_hints, hinted)
    rules.routed(e, e.prefetch_rule, e.prefetch_memory)
    if e.note_room > 0:
        note(e, DEMAND_CALL, layer, waiting, hinted, 0, 0.0)
        for place in range(waiting):
            note(e, EXPERT_OF_DEMAND, e.waiting[place], 0, 0, 0, 0.0)
        for place in range(hinted):
            note(e, HINT_OF_DEMAND, e.gate_hints[place], 0, 0, 0, 0.0)
    return int(waiting)


def mark_pending(e: Block, layer: int, waiting: int) -> int:
    """Flag the awaited experts that were already on their way; returns how many."""
    pending = 0
    for place in range(waiting):
        expert = e.waiting[place]
        loading = 1 if e.residency[layer * e.experts + expert] == LOADING else 0
        e.pending[expert] = loading
        pending += loading
    return pending


def find_ready(e: Block, layer: int, waiting: int) -> int:
    """List the awaited experts that may run now: all of them, or one; returns how many."""
    ready = 0
    for place in range(waiting):
        if e.residency[layer * e.experts + e.waiting[place]] == RESIDENT:
            e.ready[ready] = e.waiting[place]
            ready += 1
            if e.grouped == 0:
                return ready
    return ready


def drop_ready(e: Block, waiting: int, ready: int) -> int:
    """Strike the ready ids from the awaited ones, both in the same order; what is left."""
    kept = place = 0
    for i in range(waiting):
        if place < ready and e.waiting[i] == e.ready[place]:
            place += 1
        else:
            e.waiting[kept] = e.waiting[i]
            kept += 1
    return kept


def run(e: Block, tokens: int, ready: int, union: int) -> None:
    """Apply the ready experts to the window's tokens."""
    used = used_of_ready(e, ready, union) if e.demand_all == 1 else ready
    if used == 0:
        return
    compute_for(e, experts_of(e, used, tokens * e.top_k * used / union))


def experts_of(e: Block, experts: int, routes: float) -> float:
    """Seconds of some experts over some routes."""
    return float(experts_seconds(e.route_s, e.use_s, e.expert_s, e.group_launch_s, experts, routes))


def used_of_ready(e: Block, ready: int, union: int) -> int:
    """How many of the ready experts the window routed to."""
    for place in range(union):
        e.mark[e.union[place]] = 1
    used = 0
    for place in range(ready):
        used += e.mark[e.ready[place]]
    for place in range(union):
        e.mark[e.union[place]] = 0
    return int(used)


# --- windows and requests -------------------------------------------------------------------------


def decode_window(e: Block, request: int, position: int, last: int, cached: int) -> int:
    """Draft, verify, accept; returns the position after the window."""
    began_s, loads = e.clock[NOW], loads_so_far(e)
    limit = last - position - 1
    depth = rules.choose_depth(e.depth_rule, e.depth_memory, limit)
    schedule.begin_window(e, position, depth, schedule.window_end(e, position, depth))
    rules.began(e, e.prefetch_rule, e.prefetch_memory)
    note(e, BEGIN_WINDOW, position, limit, depth, 0, 0.0)
    pump_idle(e)
    for step in range(1, depth + 1):
        draft_step(e, position, cached, step)
    drafted_s = e.clock[NOW]
    while must_join(e):
        e.stall_s[request * NUM_STALLS + JOIN_STALL] += stall(e)
    demands = run_layers(e, position, depth + 1, cached, request)
    compute_for(e, fixed_seconds(e, depth + 1, cached))
    accepted = min(depth, e.accepted[position])
    loads = loads_so_far(e) - loads
    verify_s = e.clock[NOW] - drafted_s
    schedule.end_window(e)
    rules.ended(
        e.depth_rule,
        e.depth_memory,
        depth,
        accepted,
        drafted_s - began_s,
        verify_s,
        demands,
        loads,
    )
    note(e, END_WINDOW, depth, accepted, demands, loads, verify_s)
    keep_window(e, position, began_s, depth, accepted)
    return int(position + accepted + 1)


def loads_so_far(e: Block) -> int:
    """Loads started since the run began."""
    return int(e.counters[DEMAND_LOADS] + e.counters[PREFETCH_LOADS])


def draft_step(e: Block, position: int, cached: int, step: int) -> None:
    """One draft forward."""
    seconds = roof(e.draft_roof, 1, cached + step)
    draft_for(e, seconds)
    row = e.layers * e.top_k
    begin = (position + step - 1) * row
    schedule.drafted(e, e.draft, begin, begin + row)
    rules.drafted(e, e.prefetch_rule, e.prefetch_memory, step, seconds)
    note(e, DRAFTED, step, 0, 0, 0, seconds)
    pump_idle(e)


def must_join(e: Block) -> bool:
    """Whether verification waits for prefetches."""
    join = bool(e.joins == 1 and e.counters[PREFETCHING] > 0)
    note(e, MUST_JOIN, 1 if join else 0, 0, 0, 0, 0.0)
    return join


def keep_window(e: Block, position: int, began_s: float, depth: int, accepted: int) -> None:
    """Append one window to the results."""
    place = e.window_count[0]
    e.window_position[place] = position
    e.window_began_s[place] = began_s
    e.window_ended_s[place] = e.clock[NOW]
    e.window_depth[place] = depth
    e.window_accepted[place] = accepted
    e.window_count[0] = place + 1


def prefill(e: Block, number: int) -> None:
    """One pass over the prompt; its stalls are part of the prefill."""
    row = number * NUM_REQUEST
    begin, tokens, cached = (
        e.requests[row + BEGIN],
        e.requests[row + PROMPT],
        e.requests[row + CONTEXT],
    )
    schedule.begin_window(e, begin, tokens - 1, begin + tokens)
    rules.began(e, e.prefetch_rule, e.prefetch_memory)
    note(e, BEGIN_PASS, begin, tokens, 0, 0, 0.0)
    pump_idle(e)
    run_layers(e, begin, tokens, cached, number)
    schedule.end_window(e)
    note(e, END_PASS, 0, 0, 0, 0, 0.0)
    compute_for(e, roof(e.dense_roof, tokens, cached) + roof(e.end_roof, 1, cached))
    for cause in range(NUM_STALLS):
        e.stall_s[number * NUM_STALLS + cause] = 0.0


def drain(e: Block) -> None:
    """Let copies under way finish without feeding the link: their slots are to be forgotten."""
    while e.link[QUEUED] > 0:
        e.clock[NOW] = e.clock[HEAD_DONE]
        e.clock[LINK_BUSY] += e.clock[NOW] - e.clock[HEAD_BEGAN]
        e.link[QUEUE_HEAD] = wrapped(e, e.link[QUEUE_HEAD] + 1)
        e.link[QUEUED] -= 1
        e.clock[HEAD_DONE] = IDLE
        if e.link[QUEUED] > 0:
            serve_head(e)


def begin_request(e: Block) -> None:
    """Prefetch estimates restart from their priors."""
    for place in range(e.prefetch_fields):
        e.prefetch_memory[place] = e.prefetch_priors[place]
    note(e, BEGIN_REQUEST, 0, 0, 0, 0, 0.0)


def serve_prompt(e: Block, number: int) -> None:
    """Submit a prompt and prefill it."""
    times = number * NUM_TIMES
    begin_request(e)
    e.request_times[times + BEGAN_S] = e.clock[NOW]
    if e.requests[number * NUM_REQUEST + PROMPT] > 0:
        prefill(e, number)
    e.request_times[times + START_S] = e.clock[NOW]
    e.request_times[times + DRAFTED_S] = e.clock[DRAFT_S]
    e.request_times[times + COMPUTED_S] = e.clock[COMPUTE_S]
    for index in range(e.layers * e.experts):
        e.resident[index] = 1 if e.residency[index] != ABSENT else 0


def serve_text(e: Block, number: int) -> None:
    """Decode a request to its end."""
    row, times = number * NUM_REQUEST, number * NUM_TIMES
    position, last = e.requests[row + START], e.requests[row + LAST]
    before = e.requests[row + CONTEXT] - e.requests[row + BEGIN]
    while position < last:
        position = decode_window(e, number, position, last, before + position)
    drafted_s = e.request_times[times + DRAFTED_S]
    e.request_times[times + DRAFTED_S] = e.clock[DRAFT_S] - drafted_s
    computed_s = e.request_times[times + COMPUTED_S]
    e.request_times[times + COMPUTED_S] = e.clock[COMPUTE_S] - computed_s


# --- bound ----------------------------------------------------------------------------------------


def least_loads(e: Block, first: int, last: int) -> int:
    """The loads no schedule could have avoided in windows ``first`` .. ``last``, from the experts
    that were resident when the request began to decode.
    """
    if e.groups < e.layers:
        size = 0
        for window in range(first, last):
            for layer in range(e.layers):
                size = list_union(e, window, layer, layer * e.experts, size)
                e.bound_ends[(window - first) * e.layers + layer] = size
        demands = (last - first) * e.layers
        return least_of(e, demands, e.slot_begin[1], 0, e.layers * e.experts)
    loads = 0
    for layer in range(e.layers):
        size = 0
        for window in range(first, last):
            size = list_union(e, window, layer, 0, size)
            e.bound_ends[window - first] = size
        slots = e.slot_begin[layer + 1] - e.slot_begin[layer]
        loads += least_of(e, last - first, slots, layer * e.experts, e.experts)
    return loads


def least_compute(e: Block, number: int, first: int, last: int) -> float:
    """GPU seconds of a request's windows with every layer's experts run in one go."""
    row = number * NUM_REQUEST
    before = e.requests[row + CONTEXT] - e.requests[row + BEGIN]
    seconds = 0.0
    for window in range(first, last):
        position, tokens = e.window_position[window], e.window_depth[window] + 1
        cached = before + position
        for step in range(1, tokens):
            seconds += roof(e.draft_roof, 1, cached + step)
        seconds += e.layers * roof(e.layer_roof, tokens, cached + tokens)
        for layer in range(e.layers):
            union = union_of(e, position, tokens, layer)
            seconds += experts_of(e, union, tokens * e.top_k)
        seconds += fixed_seconds(e, tokens, cached)
    return seconds


def list_union(e: Block, window: int, layer: int, base: int, size: int) -> int:
    """Append one demand to the bound's list, ids from ``base``; returns the new size."""
    tokens = e.window_depth[window] + 1
    union = union_of(e, e.window_position[window], tokens, layer)
    for place in range(union):
        e.bound_ids[size + place] = base + e.union[place]
    return int(size + union)


def least_of(e: Block, demands: int, slots: int, base: int, experts: int) -> int:
    """The bound for one pool, whose residents' flags begin at ``base``."""
    for expert in range(experts):
        e.bound_kept[expert] = e.resident[base + expert]
    return count_least_loads(
        e.bound_ids,
        e.bound_ends,
        demands,
        slots,
        experts,
        e.bound_kept,
        e.bound_next,
        e.bound_until,
        e.bound_members,
    )
