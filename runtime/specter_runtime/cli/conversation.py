"""A conversation as the tokens that a model is to continue."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from specter_traces.errors import SpecterError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXIT, RESET = "/exit", "/reset"


class Conversation(ABC):
    """What was said. A line counts as said once it has an answer."""

    introduction = f"{EXIT} or Ctrl-D ends, Ctrl-C ends an answer, {RESET} forgets everything"

    @abstractmethod
    def ask(self, line: str) -> list[int]:
        """The whole conversation with a new line of the user, ready to be answered."""

    @abstractmethod
    def answered(self, line: str, tokens: list[int], text: str) -> None:
        """Add a line and its answer."""

    @abstractmethod
    def reset(self) -> None:
        """Nothing was said."""


class Templated(Conversation):
    """Turns of a user and an assistant, in the tokenizer's own chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Nothing is said yet."""
        self._tokenizer = tokenizer
        self._turns: list[dict[str, str]] = []

    def ask(self, line: str) -> list[int]:
        """All turns in the template, with what opens an answer. SpecterError if it fails."""
        apply: Any = self._tokenizer.apply_chat_template
        turns = [*self._turns, {"role": "user", "content": line}]
        try:
            tokens: list[int] = apply(turns, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # a template is the checkpoint's own text
            raise SpecterError(f"the model's chat template fails: {error}") from error
        return tokens

    def answered(self, line: str, tokens: list[int], text: str) -> None:
        """One turn each."""
        self._turns.append({"role": "user", "content": line})
        self._turns.append({"role": "assistant", "content": text})

    def reset(self) -> None:
        """No turns."""
        self._turns.clear()


class Continued(Conversation):
    """One text that both write on, for models without a chat template."""

    introduction = (
        "this model has no chat template: it continues the text that you begin\n"
        + Conversation.introduction
    )

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Nothing is said yet."""
        self._tokenizer = tokenizer
        self._text: list[int] = []

    def ask(self, line: str) -> list[int]:
        """The text so far, and the line below it."""
        first = not self._text
        given = line if first else f"\n{line}"
        added: list[int] = self._tokenizer(given, add_special_tokens=first)["input_ids"]
        return [*self._text, *added]

    def answered(self, line: str, tokens: list[int], text: str) -> None:
        """The text goes on behind the answer; what ended it is left out."""
        ended = bool(tokens) and tokens[-1] in self._tokenizer.all_special_ids
        self._text = [*self.ask(line), *(tokens[:-1] if ended else tokens)]

    def reset(self) -> None:
        """No text."""
        self._text = []


def conversation_with(tokenizer: PreTrainedTokenizerBase) -> Conversation:
    """By the tokenizer's template where it has one."""
    return Templated(tokenizer) if tokenizer.chat_template else Continued(tokenizer)
