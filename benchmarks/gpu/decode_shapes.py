"""Decode attention of one layer over batches from many short rows to few long ones.

usage: python benchmarks/gpu/decode_shapes.py OUTPUT_FOLDER [--parts backends,configs] [--repeats 9]
           [--model llama-3-8b] [--shapes 4096x84,...]

backends: what the engine's attention backends take with the model's heads, bf16, page sizes 1 and 16, as a
captured step runs them. configs: the Triton kernel in many configurations, rows as they come and longest
first, page size 16. Both beside the time to read that K and V at 4.3 TB/s. Lengths are uniform from 1 to
twice the mean. Every result is checked against the first one. Numbers are added to
OUTPUT_FOLDER/decode_shapes.jsonl; shapes that stand there are not run again. Ends with a table. Without a
GPU, tiny shapes in Triton's interpreter: for trying the script.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from common import DecodeRows, add, device_facts, median_us, read

from phalanx.kernels import DecodeConfig, longest_first
from phalanx.kernels.decode_attention import default_config
from phalanx.models.dummy import BUILTIN_CONFIGS

# Rows, tokens of each on average.
SHAPES = (
    (4096, 84), (4096, 200), (2048, 84), (2048, 400), (1024, 84), (1024, 800), (512, 84), (512, 1024),
    (280, 84), (280, 1024), (280, 2600), (128, 84), (128, 2048), (64, 4096), (32, 2048), (8, 2048),
)  # fmt: skip
TINY_SHAPES = ((3, 20), (2, 40))
CONFIGS = (
    *(DecodeConfig(16, 1, stages) for stages in (3, 5)),
    *(DecodeConfig(32, warps, stages) for warps, stages in ((1, 3), (2, 5))),
    *(DecodeConfig(64, 4, stages) for stages in (3, 5)),
    *(DecodeConfig(tokens, 1, 2, ahead=True) for tokens in (16, 32)),
    *(DecodeConfig(tokens, 2, 2, ahead=True) for tokens in (32, 64)),
    *(DecodeConfig(tokens, 4, 2, ahead=True) for tokens in (64, 128)),
)
WARM_UP_PROCESSES = 8
CALLS = 8  # in a graph


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", default="backends,configs")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--model", default="llama-3-8b", choices=sorted(BUILTIN_CONFIGS))
    parser.add_argument("--shapes", help="some of the shapes, as 4096x84,280x2600; default: all")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile is not None:
        compile_configs(heads_of(args.model), args.compile)
        return 0
    args.folder.mkdir(parents=True, exist_ok=True)
    results = args.folder / "decode_shapes.jsonl"
    if "configs" in args.parts and torch.cuda.is_available():
        command = [sys.executable, __file__, str(args.folder), "--model", args.model, "--compile"]
        for process in [subprocess.Popen([*command, str(n)]) for n in range(WARM_UP_PROCESSES)]:
            process.wait()
    for part in args.parts.split(","):
        for shape in SHAPES if torch.cuda.is_available() else TINY_SHAPES:
            name = f"{shape[0]}x{shape[1]}"
            key = (part, args.model, name)
            if (args.shapes and name not in args.shapes.split(",")) or key in done(results):
                continue
            run = {"backends": time_backends, "configs": time_configs}[part]
            record = dict(zip(("part", "model", "shape"), key, strict=True))
            record |= device_facts() | run(args.model, *shape, args.repeats)
            add(results, record)
            print(line(record), flush=True)
    print_table(read(results))
    return 0


def done(results: Path) -> set[tuple[str, str, str]]:
    return {(record["part"], record["model"], record["shape"]) for record in read(results)}


def heads_of(model: str) -> tuple[int, int, int]:
    """Query heads, KV heads, head_dim."""
    config = BUILTIN_CONFIGS[model]
    return config.num_q_heads, config.num_kv_heads, config.head_dim


def lengths(num_rows: int, mean: int) -> np.ndarray:
    return np.random.default_rng(3).integers(1, 2 * mean, num_rows)


def time_configs(model: str, num_rows: int, mean: int, repeats: int) -> dict[str, Any]:
    rows = DecodeRows(lengths(num_rows, mean), *heads_of(model), page_size=16)
    want, found = rows.attend().clone(), {}
    order = longest_first(rows.lens, backend="triton")
    for config in CONFIGS:
        for name, more in (("", {}), (" longest first", {"order": order})):
            found[label(config) + name] = checked(
                lambda config=config, more=more: rows.attend(config=config, **more), rows.out, want, repeats
            )
    alone = median_us([lambda: longest_first(rows.lens, backend="triton")] * CALLS, repeats)
    return {"floor_us": rows.floor_us, "us": found, "longest_first_us": alone}


def label(config: DecodeConfig) -> str:
    ahead = " ahead" if config.ahead else ""
    return f"t{config.tokens} w{config.num_warps} s{config.num_stages}{ahead}"


def checked(call: Callable[[], Any], out: torch.Tensor, want: torch.Tensor, repeats: int) -> float | None:
    """Median us; None where the result is wrong or the configuration does not fit the device."""
    out.fill_(torch.nan)
    try:
        got = call().double()
        error = float((got - want).norm() / want.double().norm())
        if not error < 2e-2:
            raise ArithmeticError(f"wrong result, {error:.1e} off")
        return median_us([call] * CALLS, repeats)
    except Exception as error:
        print(f"  {type(error).__name__}: {' '.join(str(error).split())[:200]}", flush=True)
        return None


def time_backends(model: str, num_rows: int, mean: int, repeats: int) -> dict[str, Any]:
    from phalanx.attention.base import DecodePart, ForwardBatch
    from phalanx.attention.registry import create_attention
    from phalanx.kernels import create_kv_indices
    from phalanx.kvcache.pool import KVPool

    config = msgspec.structs.replace(BUILTIN_CONFIGS[model], num_layers=1)
    found: dict[str, float | None] = {}
    for page_size in (1, 16):
        rows = DecodeRows(lengths(num_rows, mean), *heads_of(model), page_size)
        pool = KVPool(config, num_pages=1, page_size=page_size, dtype=torch.bfloat16, device=rows.q.device)
        pool.num_pages, pool.k, pool.v = rows.num_pages, [rows.k], [rows.v]
        indptr, indices = create_kv_indices(rows.table, rows.rows, rows.lens, page_size=page_size)
        last_page = (rows.lens - 1) % page_size + 1
        decode = DecodePart(rows.rows, rows.lens, indptr, indices, last_page)
        ids = torch.zeros(num_rows, dtype=torch.int64, device=rows.q.device)
        batch = ForwardBatch(ids, ids, ids, rows.table, None, num_rows, decode, None)
        want = None
        for name in ("triton", "flashinfer") if torch.cuda.is_available() else ("triton",):
            attn = create_attention(name, config, rows.q.device)
            state = attn.begin(batch, pool)
            if want is None:
                want = attn.forward(0, rows.q, pool, state).clone()
            out = torch.empty_like(want)

            def call(attn: Any = attn, state: Any = state, rows: Any = rows, pool: Any = pool) -> Any:
                return attn.forward(0, rows.q, pool, state)

            found[f"{name} p{page_size}"] = checked(call, out, want, repeats)
        floor_us = rows.floor_us
        del rows, pool, batch, decode, indices, state, attn
    return {"floor_us": floor_us, "us": found}


def compile_configs(heads: tuple[int, int, int], part: int) -> None:
    """Every so-many-th configuration once, so that the processes compile side by side into Triton's cache."""
    for num_rows, mean in ((2, 40), (1030, 10)):  # rows shared between programs, and not
        rows = DecodeRows(np.full(num_rows, 2 * mean), *heads, page_size=16)
        rows.table = torch.nn.functional.pad(rows.table, (0, 4096))
        order = longest_first(rows.lens)
        for config in CONFIGS[part::WARM_UP_PROCESSES]:
            for more in ({}, {"order": order}):
                try:
                    rows.attend(config=config, **more)
                except Exception as error:
                    print(f"{label(config)}: {type(error).__name__}", flush=True)
    torch.cuda.synchronize()


def line(record: dict[str, Any]) -> str:
    """The times over the floor, for `configs` the five best and the one in use."""
    floor = record["floor_us"]
    timed = sorted((us, name) for name, us in record["us"].items() if us is not None)
    shown = timed
    if record["part"] == "configs":
        _, num_kv, dim = heads_of(record["model"])
        config = default_config(int(record["shape"].split("x")[0]) * num_kv, dim, 2)
        shown = timed[:5] + [pair for pair in timed if pair[1] == label(config) + " longest first"]
    cells = ", ".join(f"{name} {us:.1f} ({us / floor:.2f})" for us, name in shown)
    more = f"; longest_first alone {record['longest_first_us']:.1f}" if "longest_first_us" in record else ""
    return f"{record['part']} {record['model']} {record['shape']}: floor {floor:.1f} us; {cells}{more}"


def print_table(records: list[dict[str, Any]]) -> None:
    for record in records:
        print(line(record))
    for model in dict.fromkeys(record["model"] for record in records):
        configs = [record for record in records if (record["part"], record["model"]) == ("configs", model)]
        if not configs:
            continue
        print(f"\n{model}: configurations, times over the floor")
        print(f"{'':<30}", *(f"{record['shape']:>9}" for record in configs))
        for name in configs[0]["us"]:
            cells = [(record["us"].get(name) or float("nan")) / record["floor_us"] for record in configs]
            print(f"{name:<30}", *(f"{cell:9.2f}" for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
