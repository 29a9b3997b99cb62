"""Phalanx beside transformers' own batched `generate`, in one run on this machine.

    python benchmarks/offline_vs_transformers.py --model smollm2 --num-prompts 256

Both get the same weights, dtype, threads and requests: random prompts of 1..32 tokens, outputs uniform in
1..128, greedy, end tokens ignored. transformers runs batches of 64 in arrival order, left-padded, each to its
longest output; tokens that were asked for are counted, not those that padding made. Runs alternate (A B A B),
so that a drifting machine still gives a fair ratio. Prints a table, then one JSON line with `ratio`.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import numpy as np

BATCH = 64


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--num-prompts", type=int, default=256)
    parser.add_argument("--random-input-len", type=int, default=32)
    parser.add_argument("--random-output-len", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def load_transformers(model: str, dtype: str):
    """The same weights in transformers' LlamaForCausalLM."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from phalanx.models.configs import load_model_config
    from phalanx.models.source import resolve_source
    from phalanx.models.weights import iter_weights

    source = resolve_source(model)
    config = load_model_config(source)
    hf = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_q_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=config.rope.theta,
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=config.tie_word_embeddings,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    )
    weights = dict(iter_weights(source, config, progress=False))
    missing, unexpected = hf.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    hf.tie_weights()
    return hf.to(getattr(torch, dtype)).eval()


def run_transformers(hf, prompts: list[np.ndarray], output_lens: list[int]) -> float:
    """Seconds for all prompts in batches of 64, each batch run to its longest output."""
    import torch

    start = time.perf_counter()
    for at in range(0, len(prompts), BATCH):
        batch, lens = prompts[at : at + BATCH], output_lens[at : at + BATCH]
        width = max(map(len, batch))
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, prompt in enumerate(batch):
            ids[i, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[i, width - len(prompt) :] = 1
        with torch.inference_mode():
            out = hf.generate(ids, attention_mask=mask, max_new_tokens=max(lens), do_sample=False)
        assert out.shape[1] == width + max(lens)
    return time.perf_counter() - start


def main() -> None:
    args = parse_args()
    import torch

    from phalanx import LLM
    from phalanx.microbench.offline import draw_workload, measure

    torch.set_num_threads(args.threads)
    llm = LLM(
        args.model,
        skip_tokenizer_init=True,
        progress=False,
        dtype=args.dtype,
        page_size=args.page_size,
        max_running_requests=BATCH,
        context_length=1024,
        num_threads=args.threads,
    )
    vocab = llm.settings.model.vocab_size
    prompts, lens = draw_workload(
        args.num_prompts, args.random_input_len, args.random_output_len, 0.0, vocab, args.seed
    )
    hf = load_transformers(args.model, args.dtype)
    measure(llm, prompts[:BATCH], [8] * len(prompts[:BATCH]), progress=False)  # warm-up
    run_transformers(hf, prompts[:BATCH], [8] * len(prompts[:BATCH]))
    tokens = sum(lens)
    ours, theirs = [], []
    for i in range(args.repeats):
        ours.append(tokens / measure(llm, prompts, lens, progress=False))
        theirs.append(tokens / run_transformers(hf, prompts, lens))
        print(f"run {i}: phalanx {ours[-1]:8.1f} tok/s   transformers {theirs[-1]:8.1f} tok/s")
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    result = {
        "model": args.model,
        "dtype": args.dtype,
        "threads": args.threads,
        "num_prompts": args.num_prompts,
        "output_tokens": tokens,
        "phalanx_tok_s": round(float(np.median(ours)), 1),
        "transformers_tok_s": round(float(np.median(theirs)), 1),
        "ratio": round(float(np.median(ratios)), 3),
        "ratios": [round(r, 3) for r in ratios],
    }
    print(f"\n{'':14}{'output tok/s':>14}\n{'phalanx':14}{result['phalanx_tok_s']:14.1f}")
    print(f"{'transformers':14}{result['transformers_tok_s']:14.1f}\n{'ratio':14}{result['ratio']:14.2f}\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
