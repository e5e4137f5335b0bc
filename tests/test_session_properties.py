"""What holds of a session whatever is asked of it, and whatever happens to it on the way."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from live import PROMPT, config_of, plain_text, session_of, text_of, toy_checkpoint

from specter_runtime.checkpoint import Checkpoint
from specter_runtime.devices import DeviceKind, Faults
from specter_runtime.layer_run import LayerRun
from specter_runtime.loaded_model import LoadedModel
from specter_runtime.prepare import plan
from specter_runtime.sampling import Sampling
from specter_runtime.session import Session, SessionOptions
from specter_sim.offload.journal import replay
from specter_sim.offload.offloader import Offloader
from specter_sim.policies import EVICTION, PREFETCH
from specter_traces import SpecterError

NAMES = ("qwen3-moe", "gpt-oss")
TOKENS = 20
LONGEST = 24


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def loaded(name: str) -> LoadedModel:
    return LoadedModel.take(toy_checkpoint(name))


@cache
def unchanged(name: str) -> Checkpoint:
    return toy_checkpoint(name)


@cache
def plain(name: str = NAMES[0], prompt: tuple[int, ...] = tuple(PROMPT)) -> list[int]:
    """What transformers writes."""
    return plain_text(unchanged(name), LONGEST, list(prompt))


# --- any system, any requests


@st.composite
def systems(draw: st.DrawFn) -> dict[str, Any]:
    """A configuration that can run: every policy, layout, depth and number of slots."""
    depth = draw(st.one_of(st.integers(0, 9), st.just("governor")))
    drafting = {name for name, info in PREFETCH.items() if "paired" in info.needs}
    able = [name for name, info in PREFETCH.items() if "future" not in info.needs]
    prefetch = draw(st.sampled_from([n for n in able if depth != 0 or n not in drafting]))
    unhelped = [name for name, i in EVICTION.items() if not i.needs & {"future", "popularity"}]
    rounds = draw(st.booleans())
    staging = draw(st.integers(0, 3))
    return {
        "policy__eviction": draw(st.sampled_from(unhelped)),
        "policy__prefetch": prefetch,
        "policy__depth": depth,
        "policy__demand": draw(st.sampled_from(["resident", "staging"])) if staging else "resident",
        "memory__layout": "global"
        if prefetch == "stream"
        else draw(st.sampled_from(["per-layer", "global"])),
        "memory__allow_rounds": rounds,
        "memory__slots": draw(st.integers(1 if rounds else 3, 8)),
        "memory__staging_slots": staging,
        "memory__initial": draw(st.sampled_from(["cold", "highest"])),
        "experts__grouped": draw(st.booleans()),
        "experts__draft_bits": draw(st.sampled_from([2, 4, 8])),
        "experts__group_size": draw(st.sampled_from([32, 64])),
        "machine__link_bandwidth": draw(st.sampled_from(["2 GB/s", "200 MB/s"])),
    }


@st.composite
def ways(draw: st.DrawFn) -> SessionOptions:
    """How it is run: on any device, with faults or without."""
    check = draw(st.booleans())
    share = st.sampled_from([0.0, 0.04])
    return SessionOptions(
        device=draw(st.sampled_from(DeviceKind)),
        context_tokens=64,
        chunk_tokens=draw(st.integers(1, 16)),
        poison=True,
        check=check,
        journal=True,
        faults=Faults(
            late=draw(share),
            reordered=draw(share),
            failed=draw(share),
            partial=draw(share),
            damaged=0.04 if check else 0.0,
            late_s=2e-4,
        ),
    )


_prompts = st.lists(st.integers(0, 95), min_size=1, max_size=20).map(tuple)
_requests = st.tuples(_prompts, st.integers(1, LONGEST), st.integers(0, 8), st.booleans())


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.sampled_from(NAMES), systems(), ways(), st.lists(_requests, min_size=1, max_size=2))
def test_any_request_of_any_system_writes_the_targets_text(
    name: str,
    system: dict[str, Any],
    way: SessionOptions,
    requests: Sequence[tuple[tuple[int, ...], int, int, bool]],
) -> None:
    """Also when it is given up after a few windows, and when another one follows."""
    with Session(plan(loaded(name), config_of(**system), way)) as session:
        written = 0
        for prompt, tokens, most_windows, greedy in requests:
            # The best of one token is drawn whatever the seed.
            drawn = None if greedy else Sampling(temperature=3.0, top_k=1)
            text = read(session.generate(prompt, tokens, drawn), most_windows)
            expected = plain(name, prompt)[:tokens]
            assert text == expected[: len(text)]
            assert len(text) == tokens or most_windows
            written += len(text)
        check_books(session, written)


def read(stream: Iterator[list[int]], most_windows: int) -> list[int]:
    """The tokens of a stream that is given up after some windows; 0 reads it all."""
    text: list[int] = []
    for window, tokens in enumerate(stream, 1):
        assert tokens
        text += tokens
        if window == most_windows:
            break
    del stream
    return text


def check_books(session: Session, written: int) -> None:
    """Nothing is held, every second and load is accounted for, and the journal replays."""
    assert not any(session.offloader.state.holds)
    result = session.result()
    assert result.committed_tokens == written
    parts = result.prefill_s + result.draft_s + result.compute_s + result.idle_s
    parts += result.stall_demand_s + result.stall_late_s + result.stall_join_s
    assert parts == pytest.approx(result.run_s) and result.idle_s >= 0
    assert result.demands == result.hits + result.pending_hits + result.misses
    assert session.scheduling_s >= 0
    assert replay(session.journals[0], Offloader(session.prepared.state(), session.rules)) is None


# --- broken off in the middle


@contextmanager
def broken(session: Session, place: int, error: BaseException) -> Iterator[None]:
    """Inside, the attention layer that is the `place`-th to run raises `error`."""
    calls = iter(range(place + 1))

    def hook(*_: object) -> None:
        if next(calls, None) == place:
            raise error

    network: Any = session.checkpoint.model
    blocks = [layer.self_attn for layer in network.model.layers]
    handles = [block.register_forward_pre_hook(hook) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize(
    ("place", "error"),
    [
        (1, KeyboardInterrupt()),
        (4, ValueError("of a model")),
        (8, KeyboardInterrupt()),
        (19, MemoryError()),
    ],
)
def test_a_forward_that_is_broken_off_leaves_no_trace(place: int, error: BaseException) -> None:
    """In the prompt, in a draft, in a verify pass, with loads under way."""
    with session_of(
        toy_checkpoint(),
        {"device": DeviceKind.EMULATED},
        memory__slots=3,
        machine__link_bandwidth="100 MB/s",
        policy__depth=3,
        policy__prefetch="continuous",
    ) as session:
        text: list[int] = []
        with broken(session, place, error), pytest.raises(type(error)):
            for tokens in session.generate(PROMPT, TOKENS):
                text += tokens
        assert text == plain()[: len(text)]
        for _ in range(2):
            assert text_of(session, TOKENS) == plain()[:TOKENS]
        check_times(session)


def check_times(session: Session) -> None:
    result = session.result()
    assert result.committed_tokens >= 2 * TOKENS
    assert session.scheduling_s > 0 and result.idle_s >= 0


@pytest.mark.parametrize("place", [0, 7, 20])
def test_experts_that_are_broken_off_give_their_slots_back(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with session_of(toy_checkpoint(), memory__slots=3, policy__depth=3) as session:
        with monkeypatch.context() as patch:
            for method in ("run", "run_all"):
                patch.setattr(LayerRun, method, interrupted(getattr(LayerRun, method), place))
            with pytest.raises(KeyboardInterrupt):
                text_of(session, TOKENS)
        assert text_of(session, TOKENS) == plain()[:TOKENS]
        assert not any(session.offloader.state.holds)


def interrupted(method: Any, place: int) -> Any:
    """The method, until it has been called `place` times."""
    calls = iter(range(place))

    def called(*args: Any) -> Any:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return method(*args)

    return called


def test_an_interrupted_clean_up_is_made_up_for() -> None:
    """A second Ctrl-C, while the loads of the broken request are waited for."""
    with session_of(toy_checkpoint(), memory__slots=3, policy__depth=3) as session:
        abandon = session.device.abandon
        session.device.abandon = interrupted(abandon, 0)  # type: ignore[method-assign]
        with broken(session, 7, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            text_of(session, TOKENS)
        with pytest.raises(KeyboardInterrupt):
            text_of(session, TOKENS)
        session.device.abandon = abandon  # type: ignore[method-assign]
        assert text_of(session, TOKENS) == plain()[:TOKENS]


def test_a_copy_that_could_not_be_submitted_is_not_waited_for() -> None:
    with session_of(
        toy_checkpoint(), {"device": DeviceKind.EMULATED}, memory__slots=3, policy__depth=2
    ) as session:
        copier: Any = session.device._copier
        for _ in range(session.prepared.link.queue_depth + 1):
            copier.submit, submit = refused(copier.submit, 5), copier.submit
            with pytest.raises(MemoryError):
                text_of(session, TOKENS)
            copier.submit = submit
        assert text_of(session, TOKENS) == plain()[:TOKENS]


def refused(submit: Any, place: int) -> Any:
    calls = iter(range(place))

    def called(*args: Any) -> None:
        if next(calls, None) is None:
            raise MemoryError("no memory left to queue a copy")
        submit(*args)

    return called


@pytest.mark.parametrize("drawn", [None, Sampling(seed=1)])
def test_broken_arithmetic_ends_one_request_only(drawn: Sampling | None) -> None:
    checkpoint = toy_checkpoint()
    network: Any = checkpoint.model
    with session_of(checkpoint, memory__slots=4, policy__depth=2) as session:
        weight = network.model.norm.weight.data
        kept = weight.clone()
        weight.fill_(float("nan"))
        with pytest.raises(SpecterError, match="logits are not numbers"):
            text_of(session, TOKENS, sampling=drawn)
        weight.copy_(kept)
        assert text_of(session, TOKENS) == plain()[:TOKENS]


# --- more than one of them


def test_a_new_request_ends_the_one_before() -> None:
    with session_of(toy_checkpoint(), memory__slots=4, policy__depth=2) as session:
        first = session.generate(PROMPT, TOKENS)
        started = next(first)
        second = session.generate(PROMPT, TOKENS)
        text = next(second)
        with pytest.raises(SpecterError, match="another request"):
            next(first)
        assert text + [token for tokens in second for token in tokens] == plain()[:TOKENS]
        assert started == plain()[: len(started)]


def test_a_forgotten_request_does_not_disturb_a_later_one() -> None:
    """Its generator dies whenever garbage is collected."""
    with session_of(toy_checkpoint(), memory__slots=3, policy__depth=2) as session:
        forgotten = session.generate(PROMPT, TOKENS)
        next(forgotten)
        later = session.generate(PROMPT, TOKENS)
        text = next(later)
        del forgotten
        assert text + [token for tokens in later for token in tokens] == plain()[:TOKENS]


def test_sessions_of_one_model_take_turns() -> None:
    options = SessionOptions(device=DeviceKind.IMMEDIATE, context_tokens=64, poison=True)
    few = plan(loaded(NAMES[0]), config_of(memory__slots=3, policy__depth=0), options)
    many = plan(loaded(NAMES[0]), config_of(memory__slots=6, policy__depth=4), options)
    with Session(few) as one, Session(many) as other:
        streams = [one.generate(PROMPT, TOKENS), other.generate(PROMPT, TOKENS)]
        texts: list[list[int]] = [[], []]
        while min(map(len, texts)) < TOKENS:
            for stream, text in zip(streams, texts, strict=True):
                text += next(stream, [])
        assert texts == [plain()[:TOKENS]] * 2
        one.close()
        assert text_of(other, TOKENS) == plain()[:TOKENS]


def test_a_session_may_move_to_another_thread() -> None:
    with session_of(toy_checkpoint(), memory__slots=4, policy__depth=2) as session:
        texts = [text_of(session, TOKENS)]
        thread = threading.Thread(target=lambda: texts.append(text_of(session, TOKENS)))
        thread.start()
        thread.join()
        assert texts == [plain()[:TOKENS]] * 2


def test_a_request_that_was_ended_is_in_the_books() -> None:
    with session_of(
        toy_checkpoint(), {"journal": True}, memory__slots=4, policy__depth=2
    ) as session:
        ended = session.generate(PROMPT, TOKENS)
        written = len(next(ended)) + len(next(ended)) + len(text_of(session, TOKENS))
        check_books(session, written)
        assert session.result().requests == 2
        del ended
        check_books(session, written)


def test_every_copy_may_be_late_and_out_of_order() -> None:
    faults = Faults(late=1.0, reordered=1.0, late_s=1e-4)
    options = {"device": DeviceKind.EMULATED, "faults": faults}
    with session_of(toy_checkpoint(), options, memory__slots=4, policy__depth=2) as session:
        assert text_of(session, TOKENS) == plain()[:TOKENS]


@pytest.mark.parametrize("device", DeviceKind)
def test_a_closed_session_says_so_and_keeps_its_results(device: DeviceKind) -> None:
    session = session_of(toy_checkpoint(), {"device": device}, memory__slots=4)
    assert len(text_of(session, TOKENS)) == TOKENS
    result = session.result()
    stream = session.generate(PROMPT, TOKENS)
    next(stream)
    session.close()
    session.close()
    with pytest.raises(SpecterError, match="is closed"):
        next(stream)
    with pytest.raises(SpecterError, match="is closed"):
        text_of(session, TOKENS)
    assert session.result().committed_tokens == result.committed_tokens + 1
    assert session.result().device_bytes == result.device_bytes == session.budget.total_bytes


def test_closed_sessions_leave_no_thread_and_no_memory() -> None:
    """A thread ends as its session is closed; tensors after five sessions are those after two."""
    options = SessionOptions(context_tokens=64)
    config = config_of(memory__slots=4, policy__depth=2, machine__link_bandwidth="1 GB/s")
    before, alive = copy_threads(), []
    for sessions in (2, 3):
        for _ in range(sessions):
            with Session(plan(loaded(NAMES[0]), config, options)) as session:
                text_of(session, 2)
                assert copy_threads() == before + 1
            assert copy_threads() == before
        del session
        gc.collect()
        alive.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
    assert alive[0] == alive[1]


def copy_threads() -> int:
    """Copy threads of this process."""
    names = [Path(task, "comm") for task in Path("/proc/self/task").iterdir()]
    return sum(name.read_text().startswith("specter") for name in names)


# --- sampling and ends


@pytest.mark.parametrize(
    "drawn",
    [
        Sampling(temperature=1e-6),
        Sampling(temperature=1e-40),
        Sampling(top_k=1),
        Sampling(temperature=50.0, top_p=1e-9),
    ],
    ids=["cold", "colder than float32", "top-k 1", "top-p 0"],
)
def test_a_distribution_of_one_token_is_greedy(drawn: Sampling) -> None:
    with session_of(toy_checkpoint(), memory__slots=4, policy__depth=4) as session:
        assert text_of(session, TOKENS, sampling=drawn) == plain()[:TOKENS]


def test_a_boundless_temperature_draws_anything_and_breaks_nothing() -> None:
    with session_of(toy_checkpoint(), memory__slots=4, policy__depth=4) as session:
        text = text_of(session, 40, sampling=Sampling(temperature=1e30))
        assert len(text) == 40 and len(set(text)) > 15
        assert text_of(session, TOKENS) == plain()[:TOKENS]


@pytest.mark.parametrize("depth", [0, 6])
@pytest.mark.parametrize("kind", [list, tuple, set])
def test_of_several_ends_the_first_in_the_text_counts(kind: Any, depth: int) -> None:
    checkpoint = toy_checkpoint()
    ends = kind([plain()[9], plain()[4], 95])
    checkpoint.model.generation_config.eos_token_id = ends
    with session_of(checkpoint, memory__slots=4, policy__depth=depth) as session:
        text = text_of(session, TOKENS)
        place = min(plain().index(end) for end in ends if end in plain())
        assert text == plain()[: place + 1]
