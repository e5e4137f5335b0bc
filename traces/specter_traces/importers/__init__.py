"""Reading other people's routing logs into traces; each refuses what it cannot trust.

Every importer returns a sealed, unpaired trace that `validate` finds sound, or raises one
SpecterError (UsageError when the request itself is wrong) that names the place in the log.
"""

from specter_traces.importers.jsonl import import_jsonl
from specter_traces.importers.llamacpp import import_llamacpp_csv
from specter_traces.importers.npz_folder import import_npz_folder
from specter_traces.importers.recorded import Origin
from specter_traces.importers.routed_experts import import_routed_experts

__all__ = [
    "Origin",
    "import_jsonl",
    "import_llamacpp_csv",
    "import_npz_folder",
    "import_routed_experts",
]
