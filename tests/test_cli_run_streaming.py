"""Text as it streams: whole characters, nothing lost, and an end when Ctrl-C asks for one."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specter_runtime.checkpoint import BUNDLED_FOLDER
from specter_runtime.cli.streaming import TextStream, interruptible


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(BUNDLED_FOLDER / "tiny-moe")
    return loaded


def streamed(stream: TextStream, tokens: list[int], sizes: list[int]) -> list[str]:
    """What each group of tokens adds, and the rest."""
    parts, place = [], 0
    for size in sizes:
        parts.append(stream.more(tokens[place : place + size]))
        place += size
    return [*parts, stream.more(tokens[place:]), stream.rest()]


@pytest.mark.parametrize("seed", range(20))
def test_the_parts_are_the_whole_text(tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
    """Random tokens: most are whole words, some are single bytes of no character."""
    chance = random.Random(seed)
    tokens = [chance.randrange(2, 4096 if chance.random() < 0.7 else 260) for _ in range(60)]
    tokens[9] = tokenizer("all")["input_ids"][-1]  # a prompt ends with a whole character
    sizes = [chance.randrange(1, 6) for _ in range(12)]
    stream = TextStream(tokenizer, tokens[:10])
    whole, before = str(tokenizer.decode(tokens)), str(tokenizer.decode(tokens[:10]))
    assert before + "".join(streamed(stream, tokens[10:], sizes)) == whole


def test_a_character_comes_when_it_is_whole(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = tokenizer("né 🙂!")["input_ids"]
    parts = streamed(TextStream(tokenizer, [5]), tokens, [1] * len(tokens))
    assert "".join(parts) == "né 🙂!" and "🙂" in parts
    assert not any("�" in part for part in parts)


def test_bytes_of_no_character_come_at_the_end(tokenizer: PreTrainedTokenizerBase) -> None:
    half = tokenizer("🙂")["input_ids"][:-1]
    stream = TextStream(tokenizer, [])
    assert [stream.more([token]) for token in half] == [""] * len(half)
    assert stream.rest() == "�"


def test_end_of_text_is_no_text(tokenizer: PreTrainedTokenizerBase) -> None:
    stream = TextStream(tokenizer, [])
    assert stream.more([*tokenizer("all")["input_ids"], tokenizer.eos_token_id]) == "all"


def test_a_space_survives_a_token_that_is_not_shown() -> None:
    """Some tokenizers drop the space before the first word of what they decode."""
    words = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "<s>": 2}, unk_token="▁a"))
    words.decoder = decoders.Metaspace()
    words.add_special_tokens(["<s>"])
    fast: Callable[..., Any] = PreTrainedTokenizerFast
    stream = TextStream(fast(tokenizer_object=words), [0])
    assert "".join(stream.more([token]) for token in (1, 2, 1)) == " b b"


def test_without_a_tokenizer_the_text_is_token_ids() -> None:
    stream = TextStream(None, [1, 2])
    assert stream.more([3, 4]) + stream.more([5]) + stream.rest() == "3 4 5 "


def test_the_first_ctrl_c_asks_and_the_second_interrupts() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible() as interruption:
        assert not interruption.asked
        os.kill(os.getpid(), signal.SIGINT)
        assert interruption.asked
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
