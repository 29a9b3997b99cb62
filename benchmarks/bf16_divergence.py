"""Where a request's tokens first differ between alone and in a batch, and by how little.

    python benchmarks/bf16_divergence.py --model smollm2 --dtype bfloat16

In fp32 there is no difference (the test suite requires it). In bf16 a matrix product of one row and one of 64
rows round differently, so two nearly equal logits may change places; from then on the texts differ. For each
prompt this prints the first position that differs and the gap of the two log-probabilities there.
For a greedy request a gap of more than a few bf16 steps (0.125 for logits of 16 to 32) would be a fault, not
rounding. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json

import numpy as np

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a small",
    "def fibonacci(n):\n",
    "2 + 2 =",
    "Water boils at",
    "The three primary colours are red,",
    "In 1969, the first human",
    "A, B, C, D,",
    "La capitale de l'Italie est",
    "She opened the door and",
]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64, help="requests that share the batch")
    return parser.parse_args()


def first_divergence(alone, together) -> dict | None:
    """The first differing position of two completions with log-probabilities of both tokens there."""
    pairs = zip(alone.token_ids, together.token_ids, strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if position is None:
        return None
    here = dict(alone.logprobs[position].top) | {
        alone.logprobs[position].token_id: alone.logprobs[position].logprob
    }
    other = together.token_ids[position]
    gap = here[alone.token_ids[position]] - here[other] if other in here else float("nan")
    return {"position": position, "gap": round(gap, 5)}


def main() -> None:
    args = parse_args()
    from phalanx import LLM, LogprobParams, SamplingParams

    llm = LLM(
        args.model,
        progress=False,
        dtype=args.dtype,
        device=args.device,
        context_length=1024,
        max_total_tokens=65536,
        random_seed=0,
    )
    want = LogprobParams(top_k=20)
    results = {}
    for kind, base in (("greedy", {"temperature": 0}), ("seeded", {"temperature": 1.0})):
        found = []
        for i, prompt in enumerate(PROMPTS):
            params = SamplingParams(
                **base, max_new_tokens=args.max_new_tokens, ignore_eos=True, sampling_seed=i
            )
            fillers = [PROMPTS[(i + j) % len(PROMPTS)] for j in range(args.batch - 1)]
            alone = llm.generate(prompt, params, logprobs=want, progress=False)[0].outputs[0]
            crowd = llm.generate([prompt, *fillers], params, logprobs=want, progress=False)
            found.append(first_divergence(alone, crowd[0].outputs[0]))
            shown = (
                "none" if found[-1] is None else f"at token {found[-1]['position']}, gap {found[-1]['gap']}"
            )
            print(f"{kind:8}{prompt[:36]!r:40} first divergence: {shown}", flush=True)
        gaps = [f["gap"] for f in found if f is not None]
        results[kind] = {
            "diverged": len(gaps),
            "of": len(PROMPTS),
            "first_positions": [None if f is None else f["position"] for f in found],
            "largest_gap": float(np.nanmax(gaps)) if gaps else None,
        }
    print(json.dumps({"model": args.model, "dtype": args.dtype, "batch": args.batch, **results}))


if __name__ == "__main__":
    main()
