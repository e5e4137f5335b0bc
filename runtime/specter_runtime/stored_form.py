"""Running a checkpoint in the form that its experts are stored in."""

from __future__ import annotations

from specter_runtime.checkpoint import Checkpoint
from specter_sim.config import RunConfig


def as_stored(checkpoint: Checkpoint, config: RunConfig) -> RunConfig:
    """The configuration, with coded experts instead of plain ones where the checkpoint holds such.

    Another coding that it asks for is left to be refused. Tokens are the same in every form.
    """
    if checkpoint.coded is None or config.experts.form != "plain":
        return config
    coding = checkpoint.coded.coding
    assert coding.draft_code is not None, "stored experts have a base"
    changes = {
        "form": "coded-base",
        "draft_bits": coding.draft_code.bits,
        "group_size": coding.group_size,
    }
    return config.model_copy(update={"experts": config.experts.model_copy(update=changes)})
