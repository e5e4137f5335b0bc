"""Time tiny-moe's layer operations with torch on this CPU, beside the machine `emulated-cpu`.

    python analysis/measure_emulated_cpu.py [MACHINE.toml]

Prints the numbers a machine file for this CPU needs, then every operation as measured and as the
closed forms predict it on the given machine. Needs the extra `runtime` (torch); takes about ten
seconds. Weights are random: only shapes matter for time.
"""

import sys
import time
from collections.abc import Callable

import torch
from torch.nn import functional

from specter_sim.hardware import ExpertForm, build_costs, find_machine, find_model
from specter_sim.hardware.costs import FFN_KERNELS

DTYPE = torch.bfloat16
CONTEXT = 512
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
GROUP = 64


def seconds(operation: Callable[[], object], repeats: int = 100) -> float:
    """The median of `repeats` timed calls, after a tenth as many warm ones."""
    for _ in range(repeats // 10):
        operation()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        operation()
        taken.append(time.perf_counter() - start)
    return sorted(taken)[repeats // 2]


def random(*shape: int) -> torch.Tensor:
    """Standard normal weights or activations."""
    return torch.randn(*shape, dtype=DTYPE)


def expert(width: int, hidden: int, tokens: int, experts: int) -> Callable[[], object]:
    """One expert over `tokens`; each call takes another expert, as decoding does."""
    weights = [
        (random(width, hidden), random(width, hidden), random(hidden, width))
        for _ in range(experts)
    ]
    x = random(tokens, hidden)
    turn = iter(range(10**9))

    def run() -> torch.Tensor:
        gate, up, down = weights[next(turn) * 7 % experts]
        return functional.linear(
            functional.silu(functional.linear(x, gate)) * functional.linear(x, up), down
        )

    return run


def moe_layer(hidden: int, experts: int, top_k: int, tokens: int) -> Callable[[], object]:
    """Attention, norms and router over `tokens` behind CONTEXT cached positions."""
    q_width, kv_width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    wq, wk, wv = random(q_width, hidden), random(kv_width, hidden), random(kv_width, hidden)
    wo, router, norm, head_norm = (
        random(hidden, q_width),
        random(experts, hidden),
        random(hidden),
        random(HEAD_DIM),
    )
    keys, values = (random(1, KV_HEADS, CONTEXT, HEAD_DIM) for _ in range(2))
    cos, sin = random(tokens, HEAD_DIM), random(tokens, HEAD_DIM)
    x = random(1, tokens, hidden)

    def rotated(z: torch.Tensor) -> torch.Tensor:
        first, second = z.chunk(2, dim=-1)
        return z * cos + torch.cat((-second, first), dim=-1) * sin

    def heads(z: torch.Tensor, count: int) -> torch.Tensor:
        return z.view(1, tokens, count, HEAD_DIM).transpose(1, 2)

    def run() -> object:
        h = functional.rms_norm(x, (hidden,), norm)
        q = rotated(
            functional.rms_norm(heads(functional.linear(h, wq), HEADS), (HEAD_DIM,), head_norm)
        )
        k = rotated(
            functional.rms_norm(heads(functional.linear(h, wk), KV_HEADS), (HEAD_DIM,), head_norm)
        )
        v = heads(functional.linear(h, wv), KV_HEADS)
        k, v = torch.cat((keys, k), dim=2), torch.cat((values, v), dim=2)
        attended = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        y = x + functional.linear(attended.transpose(1, 2).reshape(1, tokens, q_width), wo)
        logits = functional.linear(functional.rms_norm(y, (hidden,), norm), router)
        return logits.softmax(-1, dtype=torch.float32).topk(top_k).indices.tolist()

    return run


def ends(hidden: int, vocab: int, tokens: int) -> Callable[[], object]:
    """Embedding, last norm, tied head and argmax over `tokens`."""
    embedding, norm = random(vocab, hidden), random(hidden)
    ids = torch.arange(tokens)

    def run() -> object:
        x = functional.rms_norm(functional.embedding(ids, embedding), (hidden,), norm)
        return functional.linear(x, embedding).argmax(-1).tolist()

    return run


def expand(weights: int) -> Callable[[], object]:
    """Base and refinement to BF16 for one expert: bin edges by lookup, one integer addition."""
    codes = torch.randint(0, 128, (weights // 2,), dtype=torch.uint8)
    refinement = torch.randint(0, 240, (weights,), dtype=torch.uint8)
    scales = torch.rand(weights // GROUP, 1)
    edges = torch.rand(8)

    def run() -> torch.Tensor:
        nibbles = torch.stack((codes & 15, codes >> 4), dim=1).view(-1)
        lower = (edges[(nibbles & 7).long()].view(-1, GROUP) * scales).view(torch.int32) >> 16
        magnitude = lower.view(-1) + refinement
        signed = magnitude | ((nibbles >> 3).to(torch.int32) << 15)
        return signed.to(torch.int16).view(torch.bfloat16)

    return run


def main() -> None:
    """Measure, print the machine's numbers, then measured against predicted."""
    torch.manual_seed(0)
    shape = find_model("tiny-moe")
    machine = find_machine(sys.argv[1] if len(sys.argv) > 1 else "emulated-cpu")
    costs = build_costs(shape, machine, ExpertForm.PLAIN, None, grouped=False)
    hidden, width = shape.hidden_size, shape.expert_width
    expert_bytes = shape.expert_bytes()

    def experts(tokens: int) -> Callable[[], object]:
        return expert(width, hidden, tokens, shape.experts)

    big, wide, tall = random(2048, 2048), random(256, 2048), random(16384, 2048)
    read_rate = 2 * tall.numel() / seconds(lambda: functional.linear(wide[:1], tall), 20)
    launch_s = (seconds(experts(1)) - expert_bytes / read_rate) / FFN_KERNELS
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {DTYPE}")
    print(f"hbm_bytes_per_s     {read_rate / 1e9:.1f} GB/s  (64 MiB matrix times one vector)")
    flops = 2 * 256 * 2048**2 / seconds(lambda: functional.linear(wide, big), 20)
    print(f"flops_per_s         {flops:.3g}  (256 x 2048 times 2048 x 2048)")
    print(f"launch_s            {launch_s * 1e6:.1f} us  (a third of one expert beyond its read)")
    expand_rate = expert_bytes / seconds(expand(shape.expert_params))
    print(f"expand_bytes_per_s  {expand_rate / 1e9:.2f} GB/s  (base 4 bits, no escapes)")
    print(f"\n{'operation':34} {'measured':>10} {'predicted':>10}  on {machine.name}")
    rows: list[tuple[str, Callable[[], object], float]] = []
    for tokens in (1, 5, 9, 17):
        layer = moe_layer(hidden, shape.num_experts, shape.top_k, tokens)
        last = ends(hidden, shape.vocab_size, tokens)
        rows += [
            (f"expert, {tokens} tokens", experts(tokens), costs.experts_s(1, tokens)),
            (f"layer, {tokens} tokens", layer, costs.layer_s(tokens, CONTEXT)),
            (f"ends, {tokens} tokens", last, costs.fixed_s(tokens, CONTEXT)),
        ]
    for label, operation, predicted_s in rows:
        print(f"{label:34} {seconds(operation) * 1e6:7.0f} us {predicted_s * 1e6:7.0f} us")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
