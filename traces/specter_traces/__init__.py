"""Router traces: which experts a Mixture-of-Experts model chose, token by token.

The format, its files, importers for other people's logs, and statistics. Needs numpy and
safetensors only; the format is described in traces/README.md.
"""

from specter_traces.bundled import bundled, bundled_names, find_trace, open_trace
from specter_traces.container import examine, load, save
from specter_traces.errors import SpecterError, UsageError
from specter_traces.header import Decoding, DraftInfo, DraftKind, Header, SequenceInfo
from specter_traces.trace import Trace, concatenate, content_hash
from specter_traces.validation import Problem, validate

__all__ = [
    "Decoding",
    "DraftInfo",
    "DraftKind",
    "Header",
    "Problem",
    "SequenceInfo",
    "SpecterError",
    "Trace",
    "UsageError",
    "bundled",
    "bundled_names",
    "concatenate",
    "content_hash",
    "examine",
    "find_trace",
    "load",
    "open_trace",
    "save",
    "validate",
]
