"""`specter-run generate`: one prompt continued, streamed as it is committed."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specter_runtime.cli.options import (
    ConfigOption,
    DepthOption,
    DeviceOption,
    DraftBitsOption,
    DtypeOption,
    JsonOption,
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
    print_json,
    sampling_of,
    tell,
    today,
)
from specter_traces.errors import UsageError

if TYPE_CHECKING:
    from specter_runtime.prompts import Passage
    from specter_runtime.sampling import Sampling
    from specter_runtime.session import Session

PROMPT = "And it came to pass, when they had crossed the river and were come into the land, that"
"""What is continued when nobody says what."""

INTERRUPTED = 130
_SHOWN_CHARACTERS = 400


class Ending(StrEnum):
    """Why a text ended."""

    LENGTH = "length"
    END_OF_TEXT = "end of text"
    INTERRUPTED = "interrupted"


@dataclass
class Written:
    """A text as far as it is committed."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    ending: Ending = Ending.LENGTH


def generate(
    model: ModelArgument = None,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File of the text to continue; - reads stdin."),
    ] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens to write at most.")] = 64,
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
    journal: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write every scheduling decision.")
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a timeline that ui.perfetto.dev opens."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a prompt. The text streams to stdout, what it came to follows on stderr."""
    from specter_runtime.cli.files import check_writable

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
    check_count("--new-tokens", new_tokens)
    check_writable(journal, timeline)
    request = _Request(
        _passage(prompt, prompt_file),
        new_tokens,
        sampling_of(temperature, top_k, top_p, seed),
        journal,
        timeline,
    )
    raise typer.Exit(_run(system, request, as_json))


@dataclass(frozen=True)
class _Request:
    """What is to be written, and which files beside it."""

    passage: Passage
    new_tokens: int
    sampling: Sampling | None
    journal: Path | None
    timeline: Path | None


def _passage(prompt: str | None, file: Path | None) -> Passage:
    from specter_runtime.prompts import Passage, read_passages

    if prompt is not None and file is not None:
        raise UsageError("--prompt and --prompt-file are both given: give one of them")
    if file is None:
        return Passage("prompt", "prompt", PROMPT if prompt is None else prompt)
    if str(file) == "-":
        return Passage("stdin", "prompt", sys.stdin.read())
    passages = read_passages(str(file))
    if len(passages) > 1:
        raise UsageError(
            f"{file} holds {len(passages)} prompts and one is continued: "
            "give a file of one, or use specter-run bench"
        )
    return passages[0]


def _run(system: System, request: _Request, as_json: bool) -> int:
    """Open, write, tell; returns the exit code."""
    from specter_runtime.cli.opening import device_kind, load, set_threads
    from specter_runtime.prepare import check_config
    from specter_runtime.prompts import encode
    from specter_runtime.request import check_request
    from specter_runtime.session import Session, SessionOptions

    config = configuration(system)
    check_config(config)
    set_threads(system)
    checkpoint = load(system, config.model, keep_coded=True)
    prompt = encode(request.passage, checkpoint)
    context = len(prompt) + request.new_tokens
    check_request(checkpoint, prompt, request.new_tokens, context)  # before experts are moved
    options = SessionOptions(
        system.dtype,
        device_kind(system),
        context_tokens=context,
        journal=request.journal is not None,
        timeline=request.timeline is not None,
    )
    with Session.of(checkpoint, config, options) as session:
        if not as_json:
            _show_prompt(request.passage)
        written = write(session, prompt, request.new_tokens, request.sampling, not as_json)
        _tell(session, system, request, prompt, written, as_json)
    return INTERRUPTED if written.ending is Ending.INTERRUPTED else 0


def _show_prompt(passage: Passage) -> None:
    """The prompt before its continuation, on stderr; a long one from where it matters."""
    text = passage.text or " ".join(map(str, passage.tokens)) + " "
    shown = text if len(text) <= _SHOWN_CHARACTERS else f"…{text[-_SHOWN_CHARACTERS:]}"
    typer.echo(shown, err=True, nl=False)


def write(
    session: Session,
    prompt: list[int],
    new_tokens: int,
    sampling: Sampling | None,
    streamed: bool,
) -> Written:
    """Write a text, to stdout as it grows if `streamed`. Ctrl-C ends it after its window."""
    from specter_runtime.cli.streaming import TextStream, interruptible

    written = Written()
    stream = TextStream(session.checkpoint.tokenizer, prompt)

    def add(text: str) -> None:
        written.text += text
        if streamed:
            print(text, end="", flush=True)

    with interruptible() as interruption:
        for tokens in session.generate(prompt, new_tokens, sampling):
            written.tokens += tokens
            add(stream.more(tokens))
            if interruption.asked:
                written.ending = Ending.INTERRUPTED
                break
        add(stream.rest())
    if streamed:
        print(flush=True)
    if written.ending is Ending.LENGTH and len(written.tokens) < new_tokens:
        written.ending = Ending.END_OF_TEXT
    return written


def _tell(
    session: Session,
    system: System,
    request: _Request,
    prompt: list[int],
    written: Written,
    as_json: bool,
) -> None:
    from specter_runtime.cli.files import write_journals, write_spans
    from specter_runtime.cli.summary import conditions, summary

    if request.journal is not None:
        write_journals(request.journal, session.journals)
    if request.timeline is not None:
        write_spans(request.timeline, session.spans, conditions(session, system))
    if as_json:
        print_json(_document(session, system, request, prompt, written))
        return
    tell(f"\n{summary(session, system)}")
    for path in filter(None, (request.journal, request.timeline)):
        tell(f"wrote {path}")
    if written.ending is Ending.INTERRUPTED:
        tell("interrupted")


def _document(
    session: Session, system: System, request: _Request, prompt: list[int], written: Written
) -> dict[str, Any]:
    from specter_runtime.cli.summary import conditions, memory, metrics, notes
    from specter_sim.config import resolved

    result = session.result()
    return {
        "date": today(),
        "conditions": conditions(session, system),
        "prompt": request.passage.text,
        "prompt_tokens": prompt,
        "text": written.text,
        "tokens": written.tokens,
        "ended_by": written.ending.value,
        "config": resolved(session.prepared.config),
        "result": metrics(result),
        "memory": memory(session),
        "notes": notes(session, result),
        "journal": request.journal and str(request.journal),
        "timeline": request.timeline and str(request.timeline),
    }
