"""What the runtime adds to plain transformers when nothing has to be loaded.

Every expert is resident and nothing is drafted; plain `model.generate` with eager experts runs in
turn with it, in the same process, over the same tokens. Prints the ratio of their TPOT, paired,
and the share of scheduling, as medians.

    python benchmarks/overhead.py --pairs 15 --tokens 64
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import torch

from specter_runtime.checkpoint import Checkpoint, open_checkpoint
from specter_runtime.devices import DeviceKind
from specter_runtime.session import Session, SessionOptions
from specter_sim.config import build

PROMPT = "def f(x):\n    return"


def plain_s(checkpoint: Checkpoint, prompt: list[int], tokens: int) -> float:
    """Seconds of a token in plain generation, the prompt's pass taken off."""
    model: Any = checkpoint.model
    ids = torch.tensor([prompt])
    ends = []
    for new in (1, tokens):
        began_s = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        ends.append(time.perf_counter() - began_s)
    return (ends[1] - ends[0]) / (tokens - 1)


def main() -> None:
    """Run the pairs and print their medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    plain, live = open_checkpoint("tiny-moe", given.dtype), open_checkpoint("tiny-moe", given.dtype)
    plain.model.set_experts_implementation("eager")
    assert live.tokenizer is not None
    prompt: list[int] = live.tokenizer(PROMPT)["input_ids"]
    live.model.generation_config.eos_token_id = None
    config = build({"memory": {"slots": 48}, "policy": {"depth": 0}})
    session = Session.of(live, config, SessionOptions(device=DeviceKind.IMMEDIATE))
    list(session.generate(prompt, given.tokens))
    plain_s(plain, prompt, given.tokens)
    ratios, shares, tpots = [], [], []
    for _ in range(given.pairs):
        beside_s = plain_s(plain, prompt, given.tokens)
        session.forget_requests()
        list(session.generate(prompt, given.tokens))
        result = session.result()
        ratios.append(result.tpot_s / beside_s)
        shares.append(session.scheduling_s / result.run_s)
        tpots.append(result.tpot_s)
    print(
        json.dumps(
            {
                "pairs": given.pairs,
                "tokens": given.tokens,
                "threads": given.threads,
                "dtype": str(live.model.dtype),
                "tpot_s": median(tpots),
                "ratio_to_plain": median(ratios),
                "scheduling_share": median(shares),
            }
        )
    )


if __name__ == "__main__":
    main()
