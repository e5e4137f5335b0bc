"""The forms a routed expert can take, and the bytes each one costs to load, keep and read.

A plain expert is loaded as the checkpoint stores it; its draft, if any, is a separate resident
copy. A coded expert is stored losslessly in fewer bytes. With a base, a low-bit code stays resident
and computes the draft, and only the refinement is loaded.
"""

import math
from dataclasses import dataclass
from enum import Enum

from specter_sim.hardware.models import AS_16BIT_SUFFIX, ModelShape, StoredFormat
from specter_traces.errors import UsageError

# Measured shares of a BF16 expert. Gaussian weights, scales per 128: refinements beside a base of
# 4, 3 and 2 bits. Without a base: a shared exponent per group, differences, sign and mantissa.
CODED_SHARE = 0.68
REFINEMENT_SHARE = {4: 0.468, 3: 0.516, 2: 0.556}
DRAFT_BITS = (2, 3, 4, 8)
SCALE_BYTES = 2
LARGE_DRAFT = 0.6  # share of the target's bytes above which a draft is worth a remark


class ExpertForm(Enum):
    """How experts are stored on the host and kept in slots."""

    PLAIN = "plain"
    CODED = "coded"
    CODED_BASE = "coded-base"


@dataclass(frozen=True)
class ExpertBytes:
    """Bytes one routed expert costs in its form."""

    per_load: int  # over the link
    per_slot: int  # of device memory while resident
    resident_per_expert: int  # always on the device: the draft or the base; 0 without a draft
    read_per_use: int  # read by the device to apply the target's expert once
    read_per_draft_use: int  # read by the device to apply the draft's expert once; 0 without one
    expanded: int  # 16-bit bytes produced from a coded expert at each use; 0 for plain ones
    has_draft: bool
    note: str = ""  # what was assumed, for the result's notes


def expert_bytes(
    shape: ModelShape,
    form: ExpertForm,
    draft_bits: int | None,
    group_size: int = 128,
    as_16bit: bool = False,
) -> ExpertBytes:
    """The bytes of one routed expert of `shape`.

    `draft_bits` of None means that there is no draft; CODED_BASE needs 2, 3 or 4. Under PLAIN and
    CODED a draft is a separate symmetric integer copy with one 16-bit scale a group of
    `group_size` inputs. `as_16bit` treats experts stored in fewer bits as BF16 and says so in
    `note`. Raises UsageError for bits or groups that no draft has, and for coding experts that
    are not BF16.
    """
    _check_draft(form, draft_bits, group_size)
    shape = shape.as_16bit() if as_16bit else shape
    stored = shape.expert_bytes()
    draft = quantized_bytes(shape, draft_bits, group_size) if draft_bits else 0
    note = _note(shape, stored, draft)
    if form is ExpertForm.PLAIN:
        return ExpertBytes(stored, stored, draft, stored, draft, 0, draft > 0, note)
    _check_codable(shape)
    share = CODED_SHARE if form is ExpertForm.CODED else REFINEMENT_SHARE[draft_bits or 4]
    load = _coded_bytes(shape, share)
    read = load if form is ExpertForm.CODED else load + draft
    return ExpertBytes(load, load, draft, read, draft, stored, draft > 0, note)


def quantized_bytes(shape: ModelShape, bits: int, group_size: int) -> int:
    """Bytes of one expert at `bits` a weight and a 16-bit scale for each group of a row."""
    width, hidden = shape.expert_width, shape.hidden_size
    inward = (shape.expert_matrices - 1) * width * math.ceil(hidden / group_size)
    outward = hidden * math.ceil(width / group_size)
    weights = shape.expert_params - shape.expert_bias_params
    codes = math.ceil(weights * bits / 8)
    return codes + SCALE_BYTES * (inward + outward) + 2 * shape.expert_bias_params


def _coded_bytes(shape: ModelShape, share: float) -> int:
    weights = shape.expert_params - shape.expert_bias_params
    return math.ceil(2 * weights * share) + 2 * shape.expert_bias_params


def _note(shape: ModelShape, stored: int, draft: int) -> str:
    notes = []
    if shape.name.endswith(AS_16BIT_SUFFIX):
        notes.append(f"routed experts treated as BF16 ({shape.name})")
    if draft > LARGE_DRAFT * stored:
        format_name = shape.expert_format.value
        notes.append(f"the draft takes {draft / stored:.0%} of the {format_name} experts' bytes")
    return "; ".join(notes)


def _check_draft(form: ExpertForm, draft_bits: int | None, group_size: int) -> None:
    if form is ExpertForm.CODED_BASE and draft_bits not in REFINEMENT_SHARE:
        raise UsageError(
            f"a coded expert's base has 2, 3 or 4 bits, got {draft_bits}: set draft_bits to one"
        )
    if draft_bits is not None and draft_bits not in DRAFT_BITS:
        raise UsageError(f"a draft has 2, 3, 4 or 8 bits a weight, got {draft_bits}")
    if group_size < 1:
        raise UsageError(f"group_size must be at least 1, got {group_size}")


def _check_codable(shape: ModelShape) -> None:
    if shape.expert_format is not StoredFormat.BF16:
        raise UsageError(
            f"{shape.name} stores its experts as {shape.expert_format.value}, and coding is for "
            f'BF16 experts: use the form "plain", or model "{shape.name}{AS_16BIT_SUFFIX}" to '
            "treat them as BF16"
        )
