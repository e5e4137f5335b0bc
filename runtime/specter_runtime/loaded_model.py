"""A model whose experts have moved into host memory, and its drafts.

Taking the experts out is done once; sessions under other policies share the result.
"""

from __future__ import annotations

from specter_runtime.checkpoint import Checkpoint
from specter_runtime.draft_weights import DraftWeights
from specter_runtime.expert_store import ExpertStore
from specter_runtime.experts import install
from specter_runtime.host_experts import HostExperts
from specter_runtime.live_model import Network
from specter_runtime.quantizer import DraftCode
from specter_runtime.survey import Survey, survey
from specter_runtime.weight_table import stand_in


class LoadedModel:
    """Network, store and facts of one model. Drafts are quantized when first asked for."""

    def __init__(
        self, checkpoint: Checkpoint, network: Network, store: HostExperts, found: Survey
    ) -> None:
        """Use `take`."""
        self.checkpoint, self.network, self.store, self.survey = checkpoint, network, store, found
        self._drafts: dict[DraftCode, DraftWeights] = {}

    @classmethod
    def take(cls, checkpoint: Checkpoint, code: DraftCode | None = None) -> LoadedModel:
        """Move the experts out; quantize them with `code` on their way, if it is given.

        SpecterError for a model that cannot be run, or whose weights are not finite.
        """
        layers = install(checkpoint.model)
        found = survey(checkpoint.model, layers)
        draft = None
        if code is not None and not found.obstacle:
            draft = DraftWeights(layers, code)
        store = ExpertStore.take(layers, None if draft is None else draft.add)
        names = [[part.name for part in parts] for parts in store.parts]
        network = Network(checkpoint.model, layers, stand_in(layers, names))
        loaded = cls(checkpoint, network, store, found)
        if code is not None and draft is not None:
            loaded._drafts[code] = draft
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

    def close(self) -> None:
        """Give the host memory back."""
        self.store.close()
