"""Where the time of one decode step goes on the CPU, and the step against transformers' generate.

    python benchmarks/cpu_layers.py [--rows 64] [--contexts 20 150] [--dtype bfloat16] [--compare]

Weights are random; the shape is SmolLM2-135M's. Each part is timed alone, over all layers, so that parts need
not add up to the step; times are the best of `--repeats`, the machine's other load being noise. One JSON line
comes last.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import torch

from phalanx.attention.base import DecodePart, ForwardBatch
from phalanx.attention.registry import create_attention
from phalanx.config.groups import ModelConfig, RopeConfig
from phalanx.kernels import add_rms_norm, rope, silu_mul
from phalanx.kvcache.pool import KVPool
from phalanx.models.decoder import Decoder

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_q_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=100000.0),
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
CPU = torch.device("cpu")
BACKEND = "numba"


def random_weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Checkpoint name -> fp32 tensor: normal(0, 0.02), norms one."""
    generator = torch.Generator().manual_seed(0)
    targets = Decoder(config, dtype=torch.float32, device=CPU)._targets()
    targets.pop("lm_head.weight")
    return {
        name: torch.ones_like(t) if "norm" in name else torch.randn(t.shape, generator=generator) * 0.02
        for name, t in targets.items()
    }


def decode_batch(contexts: np.ndarray, max_context: int, page_size: int) -> ForwardBatch:
    """A decode step: row i + 1 has contexts[i] tokens, the new one included, on shuffled pages."""
    n = len(contexts)
    pages = max_context // page_size
    page_ids = np.random.default_rng(1).permutation(n * pages).reshape(n, pages, 1) + 1
    slots = (page_ids * page_size + np.arange(page_size)).reshape(n, -1)
    table = np.zeros((n + 1, max_context), dtype=np.int32)
    table[1:] = slots
    positions = contexts - 1
    return ForwardBatch(
        input_ids=torch.randint(0, 1000, (n,)),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(slots[np.arange(n), positions].astype(np.int64)),
        req_to_token=torch.from_numpy(table),
        logits_index=torch.arange(n),
        num_decode=n,
        decode=DecodePart(rows=torch.arange(1, n + 1), seq_lens=torch.from_numpy(contexts.astype(np.int32))),
        prefill=None,
    )


def best_ms(run: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    """Shortest of `repeats` runs after one unmeasured."""
    run()
    times = []
    for _ in range(repeats):
        start = clock()
        run()
        times.append(clock() - start)
    return 1e3 * min(times)


def parts(model: Decoder, batch: ForwardBatch, pool: KVPool) -> dict[str, Callable[[], object]]:
    """Every part of a step by name, over all layers."""
    config = model.config
    n = batch.num_decode
    attn = create_attention(BACKEND, config)
    state = attn.begin(batch, pool)
    x = torch.randn(n, config.hidden_size).to(model.dtype)
    inner = torch.randn(n, config.intermediate_size).to(model.dtype)
    heads = torch.randn(n, config.num_q_heads + 2 * config.num_kv_heads, config.head_dim).to(model.dtype)
    num_qk = config.num_q_heads + config.num_kv_heads
    q, k, v = heads[:, : config.num_q_heads], heads[:, config.num_q_heads : num_qk], heads[:, num_qk:]
    residual, gate_up = torch.zeros_like(x), torch.randn(n, 2 * config.intermediate_size).to(model.dtype)
    layers = model.layers

    def linears() -> None:
        for layer in layers:
            layer.attention.qkv(x)
            layer.attention.out(x[:, : config.q_size])
            layer.mlp.gate_up(x)
            layer.mlp.down(inner)

    def silu() -> None:
        for _ in layers:
            silu_mul(gate_up)

    def attention() -> None:
        for index in range(config.num_layers):
            attn.forward(index, q, pool, state)

    def norms() -> None:
        for layer in layers:
            add_rms_norm(x, residual, layer.input_norm.weight, layer.input_norm.eps)
            add_rms_norm(x, residual, layer.post_norm.weight, layer.post_norm.eps)

    def rope_and_store() -> None:
        for index in range(config.num_layers):
            rope(
                q,
                k,
                batch.positions,
                model.rope.cache,
                v=v,
                k_pool=pool.k[index],
                v_pool=pool.v[index],
                slot_mapping=batch.slot_mapping,
            )

    return {
        "linears": linears,
        "head": lambda: model.logits(x),
        "attention": attention,
        "norms": norms,
        "rope_store": rope_and_store,
        "silu": silu,
        "begin": lambda: attn.begin(batch, pool),
    }


def transformers_tokens_per_s(
    weights: dict[str, torch.Tensor],
    dtype: torch.dtype,
    prompts: list[int],
    new_tokens: int,
    clock: Callable[[], float],
) -> float:
    """Output tokens per second of `generate`, greedy, left padded, prefill included."""
    import transformers

    c = SMOLLM2
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_q_heads,
            num_key_value_heads=c.num_kv_heads,
            max_position_embeddings=c.max_position_embeddings,
            tie_word_embeddings=True,
            pad_token_id=0,
            eos_token_id=None,
        )
    )
    model.load_state_dict(weights, strict=False)
    model = model.to(dtype).eval()
    longest = max(prompts)
    ids = torch.randint(1, 1000, (len(prompts), longest))
    mask = (torch.arange(longest) >= longest - torch.tensor(prompts)[:, None]).long()
    settings = {"attention_mask": mask, "do_sample": False, "min_new_tokens": 1}
    with torch.inference_mode():
        model.generate(ids, max_new_tokens=2, **settings)
        start = clock()
        model.generate(ids, max_new_tokens=new_tokens, **settings)
    return len(prompts) * new_tokens / (clock() - start)


def our_tokens_per_s(
    model: Decoder, prompts: list[int], new_tokens: int, clock: Callable[[], float]
) -> float:
    """The same work through Decoder: one prefill step, then greedy decode steps."""
    from phalanx.attention.base import PrefillPart

    n, total = len(prompts), max(prompts) + new_tokens
    contexts = np.array(prompts)
    template = decode_batch(contexts, -(-total // 16) * 16, 16)
    table = template.req_to_token
    pool = KVPool(
        model.config, num_pages=n * (table.shape[1] // 16) + 1, page_size=16, dtype=model.dtype, device=CPU
    )
    attn = create_attention(BACKEND, model.config)
    start = clock()
    row = torch.arange(1, n + 1)
    token_row = torch.repeat_interleave(row, torch.tensor(prompts))
    positions = torch.cat([torch.arange(p) for p in prompts])
    batch = ForwardBatch(
        input_ids=torch.randint(1, 1000, (len(positions),)),
        positions=positions,
        slot_mapping=table[token_row, positions].long(),
        req_to_token=table,
        logits_index=torch.tensor(prompts).cumsum(0) - 1,
        num_decode=0,
        decode=None,
        prefill=PrefillPart(rows=row, starts=[0] * n, lens=prompts),
    )
    lens = torch.tensor(prompts)
    for _ in range(new_tokens - 1):
        tokens = model.logits(model.forward(batch, pool, attn)).argmax(-1)
        batch = ForwardBatch(
            input_ids=tokens,
            positions=lens.clone(),
            slot_mapping=table[row, lens].long(),
            req_to_token=table,
            logits_index=torch.arange(n),
            num_decode=n,
            decode=DecodePart(rows=row, seq_lens=(lens + 1).int()),
            prefill=None,
        )
        lens = lens + 1
    model.logits(model.forward(batch, pool, attn)).argmax(-1)
    return n * new_tokens / (clock() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--contexts", type=int, nargs=2, default=(20, 150), metavar=("LOW", "HIGH"))
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--new-tokens", type=int, default=32, help="of each row in --compare")
    parser.add_argument("--compare", action="store_true", help="also run transformers' generate and ours")
    parser.add_argument("--rounds", type=int, default=2, help="of --compare, alternating")
    parser.add_argument(
        "--cpu-time", action="store_true", help="one thread, its CPU time: steady beside other load"
    )
    args = parser.parse_args()
    if args.cpu_time:
        args.threads = 1
    clock = time.thread_time if args.cpu_time else time.perf_counter
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    weights = random_weights(SMOLLM2)
    model = Decoder(SMOLLM2, dtype=dtype, device=CPU)
    model.load_weights(weights.items())
    low, high = args.contexts
    contexts = np.random.default_rng(0).integers(low, high + 1, args.rows)
    page_size = args.page_size
    batch = decode_batch(contexts, -(-high // page_size) * page_size, page_size)
    num_pages = args.rows * (batch.req_to_token.shape[1] // page_size) + 1
    pool = KVPool(SMOLLM2, num_pages=num_pages, page_size=page_size, dtype=dtype, device=CPU)
    for tensor in pool.k + pool.v:
        tensor.normal_()
    attn = create_attention(BACKEND, SMOLLM2)
    with torch.inference_mode():
        report = {
            "step": best_ms(lambda: model.logits(model.forward(batch, pool, attn)), args.repeats, clock)
        }
        report |= {name: best_ms(run, args.repeats, clock) for name, run in parts(model, batch, pool).items()}
        parts_sum = sum(report[k] for k in ("linears", "head", "attention", "norms", "rope_store", "silu"))
        report["rest"] = report["step"] - parts_sum
        for name, ms in report.items():
            print(f"{name:12} {ms:8.2f} ms  {100 * ms / report['step']:5.1f} %")
        report["decode_tok_s"] = args.rows / report["step"] * 1e3
        if args.compare:
            new = args.new_tokens
            prompts = np.random.default_rng(0).integers(low, max(low, high - new) + 1, args.rows).tolist()
            rounds = [
                (
                    our_tokens_per_s(model, prompts, new, clock),
                    transformers_tokens_per_s(weights, dtype, prompts, new, clock),
                )
                for _ in range(args.rounds)
            ]
            for ours, theirs in rounds:
                print(f"tok/s with prefill: ours {ours:.0f}, transformers {theirs:.0f}: {ours / theirs:.2f}x")
            report["ours_tok_s"], report["transformers_tok_s"] = map(max, zip(*rounds, strict=True))
    report = {name: round(value, 3) for name, value in report.items()}
    print(
        json.dumps(
            {
                "rows": args.rows,
                "dtype": args.dtype,
                "threads": args.threads,
                "cpu_time": args.cpu_time,
                **report,
            }
        )
    )


if __name__ == "__main__":
    main()
