"""A model whose experts have moved into host memory, and its drafts.

Taking the experts out is done once; sessions under other policies share the result.
"""

from __future__ import annotations

from specter_runtime.checkpoint import Checkpoint
from specter_runtime.codec import Coding
from specter_runtime.coded_store import CodedExperts, CodedStore
from specter_runtime.draft_weights import DraftWeights
from specter_runtime.expert_store import ExpertStore
from specter_runtime.experts import ExpertLayer, install
from specter_runtime.host_experts import HostExperts
from specter_runtime.live_model import Network
from specter_runtime.quantizer import DraftCode
from specter_runtime.survey import Survey, survey
from specter_runtime.weight_table import stand_in
from specter_traces.errors import UsageError


class LoadedModel:
    """Network, store and facts of one model. Drafts are quantized when first asked for."""

    def __init__(
        self, checkpoint: Checkpoint, network: Network, store: HostExperts, found: Survey
    ) -> None:
        """Use `take`."""
        self.checkpoint, self.network, self.store, self.survey = checkpoint, network, store, found
        self._drafts: dict[DraftCode, DraftWeights] = {}

    @classmethod
    def take(
        cls, checkpoint: Checkpoint, code: DraftCode | None = None, coding: Coding | None = None
    ) -> LoadedModel:
        """Move the experts out, in coded form if a `coding` is given.

        `code`: the draft to quantize on the way. Experts that the checkpoint holds in coded form
        are taken as they are: UsageError for another `coding`. SpecterError for a model that cannot
        be run.
        """
        _require_coding(checkpoint, coding)
        layers = install(checkpoint.model)
        found = survey(checkpoint.model, layers)
        store, drafts = _stored(layers, code, coding, checkpoint.coded)
        names = [[part.name for part in parts] for parts in store.parts]
        network = Network(checkpoint.model, layers, stand_in(layers, names))
        loaded = cls(checkpoint, network, store, found)
        loaded._drafts |= drafts
        return loaded

    def draft(self, code: DraftCode) -> DraftWeights:
        """The draft in this code."""
        if code not in self._drafts:
            draft = DraftWeights(self.network.layers, code)
            for layer in range(self.store.layers):
                for expert in range(self.store.experts[layer]):
                    draft.add(layer, expert, self.store.weights(layer, expert))
            self._drafts[code] = draft
        return self._drafts[code]

    @property
    def coding(self) -> Coding | None:
        """How the experts are coded; None when they are plain."""
        return self.store.coding if isinstance(self.store, CodedStore) else None

    @property
    def base_bytes(self) -> int:
        """Device bytes that stay whether the base drafts or not: a coded expert needs it."""
        return self.store.base_bytes if isinstance(self.store, CodedStore) else 0

    def close(self) -> None:
        """Give the host memory back."""
        self.store.close()


def _stored(
    layers: tuple[ExpertLayer, ...],
    code: DraftCode | None,
    coding: Coding | None,
    ready: CodedExperts | None,
) -> tuple[HostExperts, dict[DraftCode, DraftWeights]]:
    """The experts in host memory, and the draft that came with them."""
    if coding is not None:
        coded = CodedStore.of(layers, ready) if ready else CodedStore.take(layers, coding)
        based = coding.draft_code
        return coded, {} if based is None else {based: coded.draft()}
    if code is None:
        return ExpertStore.take(layers), {}
    draft = DraftWeights(layers, code)
    return ExpertStore.take(layers, draft.add), {code: draft}


def _require_coding(checkpoint: Checkpoint, coding: Coding | None) -> None:
    """Experts that were coded before can only be run so."""
    if checkpoint.coded is None or checkpoint.coded.coding == coding:
        return
    stored = checkpoint.coded.coding
    assert stored.draft_code is not None
    asked = "plain" if coding is None else f"{coding.base}, groups of {coding.group_size}"
    raise UsageError(
        f"{checkpoint.name} holds its experts coded ({stored.base}, groups of {stored.group_size})"
        f", and they were asked for {asked}: leave that out, run the original checkpoint, or "
        "encode it again"
    )
