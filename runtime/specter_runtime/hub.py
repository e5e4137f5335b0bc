"""Models of the Hugging Face hub, through its own cache: downloaded once, then read offline."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from specter_traces.errors import SpecterError, UsageError

FILES = ("*.safetensors", "*.json", "tokenizer.model", "*.tiktoken", "*.jinja", "merges.txt")
"""What is downloaded. Never code (*.py), never pickles (*.bin, *.pt)."""

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(model: str) -> bool:
    """True for "organization/name"."""
    return _ID.fullmatch(model) is not None


def snapshot(model: str) -> Path:
    """The folder of hub model `model` in the hub's cache, downloaded if it is not there.

    HF_HUB_OFFLINE, HF_HUB_CACHE, HF_ENDPOINT and the stored login are honoured. UsageError when
    there is no such model, no leave to read it, or no way to reach it; SpecterError when a download
    fails on the way.
    """
    try:
        return Path(snapshot_download(model, allow_patterns=list(FILES)))
    except IncompleteSnapshotError:
        raise UsageError(
            f"{model} is only partly in {constants.HF_HUB_CACHE} and the hub {_unreachable()}: "
            "download it again when online"
        ) from None
    except GatedRepoError:
        raise UsageError(
            f"{model} is gated: accept its terms at {constants.ENDPOINT}/{model}, then log in "
            "with `hf auth login`"
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise UsageError(
            f"there is no folder {model}, and no such model on the hub, or it is private: check "
            "the name, or log in with `hf auth login`"
        ) from None
    except LocalEntryNotFoundError:
        raise UsageError(
            f"there is no folder {model}, no such model in {constants.HF_HUB_CACHE}, and the hub "
            f"{_unreachable()}: give a folder, or download the model first"
        ) from None
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SpecterError(f"cannot download {model}: {reason}; try again") from error


def _unreachable() -> str:
    return "is switched off (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else "cannot be reached"
