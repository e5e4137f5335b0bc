"""Text as it is committed: tokens to characters, and an end at the user's wish."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTEXT_TOKENS = 6
"""Tokens decoded again with new ones: whether a word begins with a space depends on them."""

_INCOMPLETE = "�"
"""What bytes that are no whole character decode to."""


class TextStream:
    """The characters that each group of tokens adds to a text.

    A character whose bytes are spread over tokens comes with the last of them. Without a
    tokenizer the text is the token ids.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, prompt: Sequence[int]) -> None:
        """`prompt` is what stands before the text."""
        self._tokenizer = tokenizer
        self._tokens = list(prompt[-_CONTEXT_TOKENS:])
        self._told = len(self._tokens)

    def more(self, tokens: Sequence[int]) -> str:
        """The characters that are certain now."""
        if self._tokenizer is None:
            return "".join(f"{token} " for token in tokens)
        self._tokens += tokens
        text = self._untold()
        if text.endswith(_INCOMPLETE):
            return ""
        self._tokens = self._tokens[-_CONTEXT_TOKENS:]
        self._told = len(self._tokens)
        return text

    def rest(self) -> str:
        """What is left at the end: bytes that never became a character."""
        return "" if self._tokenizer is None else self._untold()

    def _untold(self) -> str:
        before = self._decoded(self._tokens[: self._told])
        return self._decoded(self._tokens)[len(before) :]

    def _decoded(self, tokens: list[int]) -> str:
        assert self._tokenizer is not None
        text = self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)


class Interruption:
    """Whether the user has asked for an end."""

    def __init__(self) -> None:
        """Nobody has asked yet."""
        self.asked = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Inside, the first Ctrl-C only asks for an end; a second one interrupts at once."""
    interruption = Interruption()
    before = signal.signal(signal.SIGINT, interruption._ask)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, before)
