"""A live session: the target's own text under every schedule, and a schedule that replays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from live import PROMPT, plain_text, session_of, text_of, toy_checkpoint
from routes import paired_trace, serve, setup_of

from specter_runtime.devices import DeviceKind, Faults
from specter_runtime.experts import install
from specter_runtime.layer_run import LayerRun
from specter_runtime.routes import recording
from specter_runtime.sampling import Sampling
from specter_runtime.session import Session
from specter_sim.offload.journal import Journal, replay
from specter_sim.offload.offloader import Offloader
from specter_sim.policies import PREFETCH
from specter_sim.policies.state import RESIDENT
from specter_sim.presets import PRESETS
from specter_sim.types import Load
from specter_traces import SpecterError, UsageError

TOKENS = 24

SYSTEMS: dict[str, dict[str, Any]] = {
    "on-demand": {"policy__depth": 0},
    "governor": {"policy__depth": "governor", "policy__prefetch": "continuous"},
    "deep": {"policy__depth": 8, "policy__prefetch": "draft-late", "policy__eviction": "predicted"},
    "gate": {"policy__depth": 0, "policy__prefetch": "gate"},
    "staging": {"policy__depth": 3, "policy__demand": "staging", "memory__staging_slots": 2},
    "pool": {"policy__depth": 4, "memory__layout": "global", "policy__prefetch": "continuous"},
    "one-by-one": {"policy__depth": 4, "experts__grouped": False, "policy__eviction": "fifo"},
    "rounds": {"policy__depth": 4, "memory__allow_rounds": True, "memory__slots": 1},
    "highest": {"policy__depth": 2, "memory__initial": "highest"},
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def plain() -> list[int]:
    return plain_text(toy_checkpoint(), TOKENS)


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_writes_the_targets_own_text(system: str, plain: list[int]) -> None:
    settings = {"memory__slots": 4, **SYSTEMS[system]}
    with session_of(toy_checkpoint(), {"journal": True}, **settings) as session:
        assert text_of(session, TOKENS) == plain
        assert text_of(session, TOKENS) == plain  # and again, warm
        result = session.result()
        assert result.committed_tokens == 2 * TOKENS and result.requests == 2
        assert result.demands == result.hits + result.pending_hits + result.misses
        assert session.device.moved_bytes >= result.loads * session.prepared.load_bytes
        assert not any(session.offloader.state.holds)
        assert replay(session.journals[0], _fresh(session)) is None


def _fresh(session: Session) -> Offloader:
    return Offloader(session.prepared.state(), session.rules)


def test_a_changed_journal_does_not_replay() -> None:
    with session_of(toy_checkpoint(), {"journal": True}, memory__slots=4) as session:
        text_of(session, TOKENS)
        entries = session.journals[0].entries
        place = next(i for i, e in enumerate(entries) if isinstance(e.answer, Load))
        entries[place] = entries[place]._replace(answer=None)
        found = replay(session.journals[0], _fresh(session))
        assert found is not None and found.place == place


@pytest.mark.parametrize("preset", ["layer-streaming", "on-demand-lru", "next-layer-gate"])
def test_presets_without_coding_run(preset: str, plain: list[int]) -> None:
    assert preset in PRESETS
    with session_of(toy_checkpoint(), preset=preset, memory__slots=6) as session:
        assert text_of(session, TOKENS) == plain
        assert session.result().windows == TOKENS


def test_the_papers_artifact_runs(plain: list[int]) -> None:
    checkpoint = toy_checkpoint()
    with session_of(checkpoint, preset="paper-artifact", memory__slots=6) as session:
        assert text_of(session, TOKENS) == plain
        assert session.result().mean_depth > 4
        assert session.budget.staging == 32


# --- two worlds: the simulator, given the live run's routes, makes the same loads


@pytest.mark.parametrize("eviction", ["lru", "lfu", "fifo", "least-stale"])
@pytest.mark.parametrize("depth", [0, 5])
@pytest.mark.parametrize("layout", ["per-layer", "global"])
def test_the_simulator_makes_the_same_loads(eviction: str, depth: int, layout: str) -> None:
    """With an exact draft all is accepted, so that the text's routes are those of every window."""
    settings: dict[str, Any] = {
        "memory__slots": 6,
        "memory__layout": layout,
        "policy__eviction": eviction,
        "policy__depth": depth,
    }
    with session_of(toy_checkpoint(), {"journal": True, "draft": "none"}, **settings) as session:
        text = text_of(session, TOKENS)
        live = _loads(session.journals[0])
    routes = _routes_along([*PROMPT, *text])
    trace = paired_trace(routes, routes, True, 8, prompt=len(PROMPT))
    run = serve(setup_of(trace, **settings))
    assert run.result.windows == (TOKENS if depth == 0 else TOKENS // 6)
    assert _loads(run.journals[0]) == live and len(live) > 18


def _loads(journal: Journal) -> list[Load]:
    return [entry.answer for entry in journal if isinstance(entry.answer, Load)]


def _routes_along(text: list[int]) -> Any:
    """What the target's routers choose for the inputs of a text: [T, L, K]."""
    network: Any = toy_checkpoint().model
    layers = install(network)
    with torch.inference_mode(), recording(layers) as routes:
        network(input_ids=torch.tensor([text[:-1]]), use_cache=False)
    return np.stack([routes[layer.index].ids.numpy() for layer in layers], 1)


# --- speculation, sampling, ends


def test_speculation_commits_more_than_one_token_a_window(plain: list[int]) -> None:
    with session_of(toy_checkpoint(), memory__slots=8, policy__depth=4) as session:
        assert text_of(session, TOKENS) == plain
        result = session.result()
        assert result.windows < TOKENS and 0 < result.acceptance <= 1
        assert result.draft_s > 0 and result.draft_bytes > 0


def test_an_exact_draft_is_always_accepted(plain: list[int]) -> None:
    options = {"draft": "none"}
    with session_of(toy_checkpoint(), options, memory__slots=8, policy__depth=5) as session:
        assert text_of(session, TOKENS) == plain
        assert session.result().acceptance == 1.0
        assert session.result().windows == TOKENS // 6


def test_sampling_depends_on_its_seed_alone() -> None:
    def sampled(seed: int, slots: int) -> list[int]:
        with session_of(toy_checkpoint(), memory__slots=slots, policy__depth=3) as session:
            return text_of(session, 16, sampling=Sampling(temperature=1.0, seed=seed))

    first = sampled(1, 4)
    assert first == sampled(1, 8)
    assert first != sampled(2, 4)


@pytest.mark.parametrize("depth", [0, 4])
def test_a_text_ends_at_its_end(plain: list[int], depth: int) -> None:
    checkpoint = toy_checkpoint()
    end = plain[7]
    checkpoint.model.generation_config.eos_token_id = [end, 9999]
    with session_of(checkpoint, memory__slots=8, policy__depth=depth) as session:
        assert text_of(session, TOKENS) == plain[: plain.index(end) + 1]


def test_windows_never_write_past_the_length(plain: list[int]) -> None:
    with session_of(toy_checkpoint(), memory__slots=8, policy__depth=8) as session:
        for tokens in (1, 2, 5, 9):
            assert text_of(session, tokens) == plain[:tokens]


def test_a_prompt_in_chunks_is_the_same_prompt(plain: list[int]) -> None:
    for chunk in (1, 3, 128):
        options = {"chunk_tokens": chunk}
        with session_of(toy_checkpoint(), options, memory__slots=4) as session:
            assert text_of(session, TOKENS) == plain


def test_prefill_loads_an_expert_once_a_layer_and_leaves_the_cache_warm() -> None:
    long = [(7 * place) % 90 for place in range(60)]
    with session_of(toy_checkpoint(), {"journal": True}, memory__slots=4) as session:
        text_of(session, 1, long)
        entries = session.journals[0].entries
        end = next(i for i, entry in enumerate(entries) if entry.call == "end_pass")
        loads = [e.answer.expert for e in entries[:end] if isinstance(e.answer, Load)]
        assert len(loads) == len(set(loads)) > 12  # more than there are slots
        assert sum(where == RESIDENT for where in session.offloader.state.residency) >= 12


def test_one_token_of_prompt_is_enough() -> None:
    expected = plain_text(toy_checkpoint(), 8, [3])
    with session_of(toy_checkpoint(), memory__slots=4, policy__depth=2) as session:
        assert text_of(session, 8, [3]) == expected


# --- faults and interruptions


def test_faults_on_the_link_never_change_the_text(plain: list[int]) -> None:
    faults = Faults(late=0.1, reordered=0.2, failed=0.1, partial=0.1, late_s=2e-4)
    options = {"faults": faults, "check": True}
    with session_of(
        toy_checkpoint(), options, memory__slots=3, policy__depth=4, policy__prefetch="continuous"
    ) as session:
        assert text_of(session, TOKENS) == plain
        assert session.device.failed_copies > 0


def test_a_dead_link_ends_a_request_and_the_session_goes_on(plain: list[int]) -> None:
    with session_of(toy_checkpoint(), {"faults": Faults()}, memory__slots=3) as session:
        copier: Any = session.device._copier
        copier._faults = Faults(failed=1.0)
        with pytest.raises(SpecterError, match="did not arrive in 8 tries"):
            text_of(session, TOKENS)
        copier._faults = Faults()
        assert text_of(session, TOKENS) == plain


def test_a_request_given_up_leaves_nothing_behind(plain: list[int]) -> None:
    for windows in (1, 3):
        with session_of(toy_checkpoint(), memory__slots=3, policy__depth=2) as session:
            stream = session.generate(PROMPT, TOKENS)
            first = [next(stream) for _ in range(windows)]
            del stream
            assert [token for part in first for token in part] == plain[: sum(map(len, first))]
            assert text_of(session, TOKENS) == plain
            assert session.result().requests == 2


def test_a_new_request_ends_an_older_one(plain: list[int]) -> None:
    with session_of(toy_checkpoint(), memory__slots=4, policy__depth=2) as session:
        older = session.generate(PROMPT, TOKENS)
        next(older)
        assert text_of(session, TOKENS) == plain
        assert session.result().requests == 2  # the older one counts as far as it came
        with pytest.raises(SpecterError, match="another request was started"):
            next(older)
        assert text_of(session, TOKENS) == plain


def test_an_interrupt_inside_the_arithmetic_leaves_the_session_whole(
    plain: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    run = LayerRun.run

    def interrupted(self: LayerRun, experts: list[int]) -> None:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise KeyboardInterrupt
        run(self, experts)

    monkeypatch.setattr(LayerRun, "run", interrupted)
    with session_of(toy_checkpoint(), memory__slots=3, policy__depth=2) as session:
        with pytest.raises(KeyboardInterrupt):
            text_of(session, TOKENS)
        assert session.scheduling_s >= 0
        assert text_of(session, TOKENS) == plain


def test_a_closed_session_says_so() -> None:
    session = session_of(toy_checkpoint(), memory__slots=4)
    stream = session.generate(PROMPT, TOKENS)
    next(stream)
    session.close()
    for attempt in (lambda: next(stream), lambda: session.generate(PROMPT, 1)):
        with pytest.raises(SpecterError, match="the session is closed"):
            attempt()
    assert session.result().requests == 1


def test_every_request_restarts_what_prefetch_has_learned() -> None:
    with session_of(toy_checkpoint(), {"journal": True}, memory__slots=4) as session:
        for _ in range(3):
            text_of(session, 2)
            session.forget_requests()
        calls = [entry.call for entry in session.journals[0]]
        assert calls.count("begin_request") == 3


def test_a_model_whose_experts_are_gone_says_so() -> None:
    checkpoint = toy_checkpoint()
    session_of(checkpoint, memory__slots=4).close()
    with pytest.raises(SpecterError, match="moved out before: load it again"):
        session_of(checkpoint, memory__slots=4)


def test_a_paced_link_writes_the_same_text(plain: list[int]) -> None:
    with session_of(
        toy_checkpoint(),
        {"device": DeviceKind.EMULATED, "timeline": True},
        memory__slots=4,
        machine__link_bandwidth=50e6,
        policy__depth=3,
        policy__prefetch="continuous",
    ) as session:
        assert text_of(session, TOKENS) == plain
        result = session.result()
        parts = result.prefill_s + result.draft_s + result.compute_s + result.idle_s
        parts += result.stall_demand_s + result.stall_late_s + result.stall_join_s
        assert parts == pytest.approx(result.run_s)
        assert result.link_busy_s > 0 and result.idle_s >= 0
        assert {span.track for span in session.spans} == {"link", "gpu"}
        assert result.distance_to_bound > 1


# --- what cannot run


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy__eviction": "belady"}, "reads the future"),
        ({"policy__depth": "profile"}, "measured by specter-sim"),
        ({"experts__form": "coded-base", "experts__draft_bits": 8}, "has 2, 3 or 4 bits, got 8"),
        ({"memory__slots": 9}, "has 8 experts a layer, got 9 slots"),
        ({"memory__slots": 2}, "needs 3 slots in MoE layer 0 for one token, got 2"),
        ({"memory__budget": "20 kB"}, "smallest budget that works is"),
        ({"policy__eviction": "hot-lru"}, "capture a trace of this model"),
        ({"memory__initial": "popular"}, "capture a trace of this model"),
    ],
)
def test_what_cannot_run_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        session_of(toy_checkpoint(), **settings)


@pytest.mark.parametrize(
    ("prompt", "tokens", "message"),
    [
        ([], 4, "no token"),
        ([96], 4, "outside the vocabulary"),
        ([3], 0, "at least 1 token"),
        ([3] * 60, 80, "exceed the context"),
        ([3] * 20, 60, "was planned for 64 tokens"),
    ],
)
def test_requests_that_cannot_run_are_refused(prompt: list[int], tokens: int, message: str) -> None:
    with (
        session_of(toy_checkpoint(), {"context_tokens": 64}, memory__slots=4) as session,
        pytest.raises(UsageError, match=message),
    ):
        text_of(session, tokens, prompt)


def test_no_result_before_a_token() -> None:
    with (
        session_of(toy_checkpoint(), memory__slots=4) as session,
        pytest.raises(SpecterError, match="nothing was decoded"),
    ):
        session.result()


def test_every_prefetch_that_does_not_know_the_future_can_run() -> None:
    for name, info in PREFETCH.items():
        layout = "global" if name == "stream" else "per-layer"
        settings: dict[str, Any] = {"policy__prefetch": name, "memory__layout": layout}
        if "future" in info.needs:
            continue
        with session_of(toy_checkpoint(), memory__slots=6, policy__depth=2, **settings) as session:
            assert len(text_of(session, 6)) == 6
