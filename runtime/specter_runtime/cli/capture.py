"""`specter-run capture`: record a paired trace of a model and its quantized draft."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specter_traces.errors import SpecterError, UsageError

if TYPE_CHECKING:
    from specter_runtime.capture import CaptureSettings, Recorder
    from specter_runtime.prompts import Passage
    from specter_traces import Decoding, Trace

_REPETITIVE = 0.2
"""Mean share of repeated 8-grams above which a trace flatters every cache."""


def capture(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Bundled model (tiny-moe) or a local folder.")],
    out: Annotated[Path, typer.Option(help="Trace file to write (.safetensors).")],
    prompts: Annotated[
        str, typer.Option(help="Prompts to continue: a bundled set or a .jsonl/.txt file.")
    ] = "starters",
    follow: Annotated[
        str | None, typer.Option(help="Follow this given text instead of writing one.")
    ] = None,
    draft: Annotated[
        str, typer.Option(help="base4, base3, base2, int8, int4, int3 or none.")
    ] = "base4",
    group_size: Annotated[int, typer.Option(help="Weights that share a scale, 32 to 128.")] = 64,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Always the best token; small models loop.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Likeliest tokens that are sampled.")] = None,
    top_p: Annotated[float, typer.Option(help="Share of probability that is sampled.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampled text.")] = 0,
    new_tokens: Annotated[int, typer.Option(help="Tokens to write after a prompt.")] = 256,
    max_tokens: Annotated[int, typer.Option(help="Where a followed text is cut.")] = 512,
    prompt_tokens: Annotated[
        int, typer.Option(help="Leading tokens of a followed text that count as prompt.")
    ] = 16,
    sequences: Annotated[int | None, typer.Option(help="Only the first prompts.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the trace; else the file's.")] = None,
    licence: Annotated[str, typer.Option(help="Licence of the text and the trace.")] = "",
    dtype: Annotated[
        str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")
    ] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads; else torch's choice.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Record a paired router trace of a model and its quantized draft.

    The target continues prompts (sampled unless --greedy) or follows a given text; then the draft,
    whose routed experts are quantized, reads the same tokens. Ctrl-C keeps finished sequences.
    """
    from specter_runtime.capture import CaptureSettings
    from specter_runtime.quantizer import parse
    from specter_runtime.sampling import Sampling
    from specter_traces import save

    _check_output(out)
    if temperature == 0:
        raise UsageError("a temperature of 0 is greedy: use --greedy")
    decoding = _decoding(greedy, follow)
    settings = CaptureSettings(
        draft=parse(draft, group_size),
        decoding=decoding,
        sampling=Sampling(temperature, top_k, top_p, seed),
        new_tokens=new_tokens,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
    )
    passages = _passages(follow or prompts, sequences)
    recorder = _open(model, dtype, threads, settings)
    parts, interrupted = record_all(recorder, passages)
    trace = recorder.join(
        parts,
        name or out.stem,
        source=f"text {follow}" if follow else f"prompts {prompts}",
        licence=licence,
        created_by=shlex.join(["specter-run", *(context.obj or sys.argv[1:])]),
    )
    trace = save(trace, out)
    _report(trace, out, as_json)
    if interrupted:
        raise SpecterError(
            f"interrupted: {trace.num_sequences} of {len(passages)} sequences are in {out}"
        )


def _decoding(greedy: bool, follow: str | None) -> Decoding:
    from specter_traces import Decoding

    if greedy and follow is not None:
        raise UsageError("--greedy writes a text, --follow is given one: choose one of them")
    if follow is not None:
        return Decoding.TEXT
    return Decoding.GREEDY if greedy else Decoding.SAMPLED


def _passages(source: str, limit: int | None) -> Sequence[Passage]:
    from specter_runtime.prompts import read_passages

    if limit is not None and limit < 1:
        raise UsageError(f"--sequences must be at least 1, got {limit}")
    return read_passages(source)[:limit]


def _open(model: str, dtype: str, threads: int | None, settings: CaptureSettings) -> Recorder:
    import torch

    from specter_runtime.capture import Recorder
    from specter_runtime.checkpoint import open_checkpoint

    if threads is not None:
        if threads < 1:
            raise UsageError(f"--threads must be at least 1, got {threads}")
        torch.set_num_threads(threads)
    return Recorder(open_checkpoint(model, dtype), settings)


def record_all(recorder: Recorder, passages: Sequence[Passage]) -> tuple[list[Trace], bool]:
    """Record all passages with progress on stderr; True when Ctrl-C ended it early."""
    from rich.console import Console
    from rich.progress import track

    parts: list[Trace] = []
    console = Console(stderr=True)
    recorded = recorder.sequences(passages)
    try:
        for part in track(
            recorded, "recording", total=len(passages), console=console, transient=True
        ):
            parts.append(part)
    except KeyboardInterrupt:
        if not parts:
            raise SpecterError("interrupted before a sequence was finished") from None
        return parts, True
    return parts, False


def _check_output(out: Path) -> None:
    """Refuse an output that cannot be written before any work is done."""
    if out.suffix != ".safetensors":
        raise UsageError(f"--out must end in .safetensors, got {out}")
    folder = out.resolve().parent
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(
            f"cannot write {out}: {reason}; choose a folder that can be written"
        ) from None
    if out.is_dir():
        raise UsageError(f"cannot write {out}: it is a folder; give a file name")


def _report(trace: Trace, out: Path, as_json: bool) -> None:
    summary = summarize(trace)
    _warn_of_loops(summary["repetition"])
    if as_json:
        print(json.dumps({"file": str(out), **summary}))
        return
    draft = trace.header.draft
    print(f"{out}: {trace.header.model}, draft {draft.name if draft else 'none'}")
    for key, value in summary.items():
        print(f"  {key:22} {value:.4f}" if isinstance(value, float) else f"  {key:22} {value}")
    for note in trace.header.notes:
        print(f"  note: {note}")


def _warn_of_loops(repetition: float) -> None:
    if repetition > _REPETITIVE:
        print(
            f"warning: {repetition:.0%} of the 8-grams are repeats: a looping text "
            "flatters every cache; sample (without --greedy) or follow a given text",
            file=sys.stderr,
        )


def summarize(trace: Trace) -> dict[str, Any]:
    """Figures of a captured trace, over continuation positions where that matters."""
    from specter_traces import statistics

    kept = statistics.acceptance(trace)
    gate = trace.gate_ids is not None
    return {
        "sequences": trace.num_sequences,
        "positions": trace.num_positions,
        "greedy_agreement": kept.greedy,
        "sampled_acceptance": kept.sampled,
        "route_recall": float(statistics.fidelity(trace).recall.mean()),
        "gate_recall": float(statistics.gate_fidelity(trace).recall.mean()) if gate else None,
        "repetition": sum(trace.header.repetition) / len(trace.header.repetition),
    }
