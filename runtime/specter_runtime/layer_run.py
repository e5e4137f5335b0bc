"""One MoE layer of one target pass: run experts in whatever order they arrive, sum them in order.

The architecture's own loop computes the experts. When all that the window needs are there at once,
it runs once over everything. Otherwise it runs over the token-expert pairs of those that are there;
what it would have added is caught and added at the end in expert-id order, in the number type of
the loop's own sum. So the result has the same bits whatever the order of arrival.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from specter_runtime.experts import reference


class LayerRun:
    """The routed experts of one layer over the T tokens of a pass."""

    def __init__(self, module: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> None:
        """hidden: [T, D] what enters the experts; ids, weights: [T, K] the router's choice."""
        self._module, self._hidden, self._ids, self._weights = module, hidden, ids, weights
        self._output: Tensor | None = None
        self._uses: Counter[int] = Counter()
        self._added: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def began(self) -> bool:
        """Whether some expert has been computed."""
        return bool(self._added)

    def union(self) -> list[int]:
        """The experts that some token chose, ascending."""
        self._uses = Counter(expert for row in self._ids.tolist() for expert in row)
        # Some routers answer "none" with an id past the last expert.
        count = int(self._module.num_experts)  # type: ignore[arg-type]
        return sorted(expert for expert in self._uses if 0 <= expert < count)

    def routes(self, experts: Sequence[int]) -> int:
        """Token-expert pairs of some experts of the union."""
        return sum(self._uses[expert] for expert in experts)

    def run_all(self) -> None:
        """Compute every expert of the union: all of them are resident."""
        loop = reference(self._module)
        self._output = loop(self._module, self._hidden, self._ids, self._weights)

    def run(self, experts: Sequence[int]) -> None:
        """Compute some experts of the union, all of them resident; each once in a pass."""
        chosen = torch.isin(self._ids, torch.tensor(experts))
        # Rank by rank, as the loop over everything goes: each product then has the same rows.
        ranks, tokens = torch.where(chosen.T)
        pairs = (self._hidden[tokens], self._ids[tokens, ranks], self._weights[tokens, ranks])
        caught = _Additions()
        with caught:
            reference(self._module)(self._module, pairs[0], pairs[1][:, None], pairs[2][:, None])
        for rows, values in caught.additions:
            expert = int(pairs[1][rows[0]])
            self._added[expert] = (tokens[rows], values)

    def output(self) -> Tensor:
        """The sum over experts, [T, D]; zeros where a token chose none."""
        if self._output is not None:
            return self._output
        if not self._added:
            return torch.zeros_like(self._hidden)
        first = next(iter(self._added.values()))[1]
        total = torch.zeros(len(self._hidden), first.shape[-1], dtype=first.dtype)
        for expert in sorted(self._added):
            total.index_add_(0, *self._added[expert])
        return total.to(self._hidden.dtype)


class _Additions(TorchFunctionMode):
    """Catches what a loop over experts adds to its sum, one addition an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.additions: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.index_add_:
            into, _, rows, values = args
            self.additions.append((rows, values))
            return into
        return func(*args, **(kwargs or {}))
