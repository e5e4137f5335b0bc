"""`specter-run chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from specter_runtime.cli.conversation import EXIT, RESET, Conversation, conversation_with
from specter_runtime.cli.generate import Ending, write
from specter_runtime.cli.options import (
    ConfigOption,
    DepthOption,
    DeviceOption,
    DraftBitsOption,
    DtypeOption,
    LinkOption,
    ModelArgument,
    PolicyOption,
    SeedOption,
    SetOption,
    SlotsOption,
    System,
    TemperatureOption,
    ThreadsOption,
    TopKOption,
    TopPOption,
    VramOption,
    check_count,
    configuration,
    sampling_of,
    tell,
)
from specter_traces.errors import SpecterError, UsageError

if TYPE_CHECKING:
    from specter_runtime.sampling import Sampling
    from specter_runtime.session import Session


def chat(
    model: ModelArgument = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 256,
    context: Annotated[
        int, typer.Option(help="Tokens of the whole conversation at most; KV is planned for it.")
    ] = 2048,
    vram: VramOption = None,
    slots: SlotsOption = None,
    link: LinkOption = None,
    policy: PolicyOption = None,
    depth: DepthOption = None,
    draft_bits: DraftBitsOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = "emulated",
    dtype: DtypeOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Talk to a model. /exit or Ctrl-D ends, Ctrl-C ends an answer, /reset forgets everything."""
    check_count("--new-tokens", new_tokens)
    check_count("--context", context)
    system = System(
        model,
        config,
        policy,
        vram,
        slots,
        link,
        depth,
        draft_bits,
        tuple(settings or ()),
        device,
        dtype,
        threads,
    )
    _run(system, context, new_tokens, sampling_of(temperature, top_k, top_p, seed))


def _run(system: System, context: int, new_tokens: int, sampling: Sampling | None) -> None:
    from specter_runtime.cli.opening import device_kind, load, set_threads
    from specter_runtime.cli.summary import summary
    from specter_runtime.prepare import check_config
    from specter_runtime.session import Session, SessionOptions

    config = configuration(system)
    check_config(config)
    set_threads(system)
    checkpoint = load(system, config.model, keep_coded=True)
    if checkpoint.tokenizer is None:
        raise UsageError(f"{checkpoint.name} has no tokenizer.json: there is nothing to talk with")
    context = min(context, checkpoint.context_tokens or context)
    conversation = conversation_with(checkpoint.tokenizer)
    options = SessionOptions(system.dtype, device_kind(system), context_tokens=context)
    with Session.of(checkpoint, config, options) as session:
        tell(conversation.introduction)
        answered = _converse(session, conversation, new_tokens, sampling)
        if answered:
            tell(f"\n{summary(session, system)}")


def _converse(
    session: Session, conversation: Conversation, new_tokens: int, sampling: Sampling | None
) -> int:
    """Answer line by line; returns how many answers were begun."""
    answers = 0
    while (line := _read_line()) is not None:
        if line == EXIT:
            break
        if line == RESET:
            conversation.reset()
            tell("forgotten")
        elif line.strip():
            drawn = None if sampling is None else replace(sampling, seed=sampling.seed + answers)
            answers += _answer(session, conversation, line, new_tokens, drawn)
    return answers


def _read_line() -> str | None:
    """One line; None at the end of the input. Ctrl-C forgets what was typed."""
    prompt = ""
    if sys.stdin.isatty():
        prompt = "> "
        with suppress(ImportError):
            import readline  # noqa: F401  # its import gives input() editing and a history
    while True:
        try:
            return input(prompt)
        except EOFError:
            return None
        except KeyboardInterrupt:
            tell(f"\n{EXIT} or Ctrl-D ends")


def _answer(
    session: Session,
    conversation: Conversation,
    line: str,
    new_tokens: int,
    sampling: Sampling | None,
) -> bool:
    """Answer one line; a line that cannot be answered is told and forgotten."""
    try:
        prompt = conversation.ask(line)
        most = session.prepared.options.context_tokens
        room = most - len(prompt)
        if room < 1:
            raise UsageError(
                f"the conversation has {len(prompt)} tokens, the most are {most}: "
                f"{RESET} starts again, --context allows more"
            )
        written = write(session, prompt, min(new_tokens, room), sampling, streamed=True)
    except SpecterError as error:
        tell(f"error: {error}")
        return False
    conversation.answered(line, written.tokens, written.text)
    if written.ending is Ending.INTERRUPTED:
        tell("(ended by Ctrl-C)")
    return True
