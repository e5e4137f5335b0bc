"""Turn the rows of `specter-run bench --out` into a validation file for `specter-sim report`.

    python analysis/validation_points.py rows.csv --machine "AMD EPYC, 2 shared cores" > points.json

Each measured row gives two points, TPOT and bytes per token, with what the simulator had predicted
from the routes of the same texts and from timings of the same machine.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

from specter_runtime.cli.systems import DEFAULTS
from specter_sim.presets import PRESETS

METRICS = {
    "tpot_s": "predicted_tpot_s",
    "bytes_per_token": "predicted_bytes_per_token",
}
KEYS = ("policy.eviction", "policy.prefetch", "policy.depth", "experts.form", "memory.layout")


def points_of(row: dict[str, str], machine: str) -> list[dict[str, Any]]:
    """The points of one measured row; none where nothing was predicted."""
    policy = row["policy"]
    keys = DEFAULTS.get(policy) or (PRESETS[policy].overrides if policy in PRESETS else None)
    if keys is None or row["error"] or not row["predicted_tpot_s"]:
        return []
    config = {
        "model": row["model"],
        "machine.name": "emulated-cpu",
        "machine.link_bandwidth": float(row["link_bytes_per_s"]),
        "memory.budget": int(float(row["budget_bytes"])),
        **{key: keys[key] for key in KEYS},
    }
    return [
        {
            "name": f"{policy} at {float(row['link_bytes_per_s']) / 1e6:g} MB/s",
            "date": row["date"],
            "machine": machine,
            "source": f"specter-run bench, {row['sequences']} prompts, {row['new_tokens']} tokens "
            f"each, {row['sampling']}; routes of the same texts, costs timed on the same machine",
            "config": config,
            "metric": metric,
            "predicted": float(row[predicted]),
            "measured": float(row[metric]),
        }
        for metric, predicted in METRICS.items()
        if float(row[metric]) > 0 and float(row[predicted]) > 0
    ]


def main() -> None:
    """Read rows, print points."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--machine", required=True, help="what was measured, in words")
    given = parser.parse_args()
    with given.rows.open(newline="") as file:
        points = [point for row in csv.DictReader(file) for point in points_of(row, given.machine)]
    print(json.dumps({"points": points}, indent=1))


if __name__ == "__main__":
    main()
