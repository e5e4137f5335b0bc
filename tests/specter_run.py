"""Running `specter-run` inside the tests' process, as a user meets it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import pytest

from specter_runtime import cli
from specter_runtime.sampling import Sampling
from specter_runtime.session import Session


class Told(NamedTuple):
    """What a command left: its exit code, stdout and stderr."""

    code: int
    out: str
    err: str

    def document(self) -> dict[str, Any]:
        """The JSON document, which is all of stdout."""
        document: dict[str, Any] = json.loads(self.out)
        return document


def run(capture: pytest.CaptureFixture[str], *arguments: object) -> Told:
    """Run a command; what earlier ones printed is dropped."""
    capture.readouterr()
    with pytest.raises(SystemExit) as left:
        cli.main([str(argument) for argument in arguments])
    code = left.value.code
    assert isinstance(code, int | None)
    return Told(code or 0, *capture.readouterr())


class InterruptedSession(Session):
    """A session in front of which somebody presses Ctrl-C as its first request's windows end.

    `presses` are how often, window by window. `prompts` are the requests it served.
    """

    presses: Sequence[int] = (0, 1)
    prompts: ClassVar[list[list[int]]] = []

    def generate(
        self, prompt: Sequence[int], new_tokens: int, sampling: Sampling | None = None
    ) -> Iterator[list[int]]:
        self.prompts.append(list(prompt))
        presses = iter(self.presses if len(self.prompts) == 1 else ())
        for tokens in super().generate(prompt, new_tokens, sampling):
            for _ in range(next(presses, 0)):
                os.kill(os.getpid(), signal.SIGINT)
            yield tokens


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> type[InterruptedSession]:
    """Commands open such a session."""
    for module in ("session", "cli.workbench"):
        monkeypatch.setattr(f"specter_runtime.{module}.Session", InterruptedSession)
    monkeypatch.setattr(InterruptedSession, "prompts", [])
    return InterruptedSession
