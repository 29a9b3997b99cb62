"""The model kernels compile for a Hopper GPU on any machine: the interpreter is laxer than the compiler.

Those of attention also for a card with the least shared memory, into which their tiles must fit.

Compiled in a process of its own, without the interpreter; no device is needed to get machine code.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile them here")

PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from phalanx.kernels.decode_attention import default_config
from phalanx.kernels import (
    decode_attention_long_triton, decode_attention_triton, prefill_attention_triton, rmsnorm_triton,
    rope_triton, row_order_triton, sample_triton, silu_mul_triton,
)

FLOATS = "q k v k_pool v_pool out x residual weight gate_up q_norm k_norm logits".split()
TYPES = dict.fromkeys(FLOATS, "*bf16")
TYPES |= dict.fromkeys("rows positions slot_mapping seeds tile_chunks tile_firsts".split(), "*i64")
TYPES |= dict.fromkeys("table seq_lens indptr starts stop_ids counts offsets tokens".split(), "*i32")
TYPES |= dict.fromkeys("short_lens lanes first_piece order".split(), "*i32")
TYPES |= dict.fromkeys("partial cache peaks sums temperature".split(), "*fp32")
TYPES |= {"finish": "*u8", "scale": "fp32", "eps": "fp32"}

SMALL = 89, 99 * 1024  # a card with little shared memory, and what a program can have there

def check(kernel, absent="", warps=4, card=(90, 227 * 1024), **consts):
    consts |= dict.fromkeys(absent.split())
    names = kernel.arg_names
    signature = {n: "constexpr" if n in consts else TYPES.get(n, "i32") for n in names}
    aligned = [i for i, n in enumerate(names) if signature[n].startswith("*") or n.endswith("stride")]
    attrs = {(i,): [["tt.divisibility", 16]] for i in aligned if names[i] not in consts}
    source = ASTSource(kernel, signature, consts, attrs)
    made = triton.compile(source, target=GPUTarget("cuda", card[0], 32), options={"num_warps": warps})
    assert made.asm["cubin"]
    assert made.metadata.shared <= card[1], (kernel.__name__, consts, made.metadata.shared)
    print(kernel.__name__, consts)

attention = dict(KV_HEADS=8, DIM=128, DIM_BLOCK=128, SPLIT_TOKENS=256, UPCAST=False)
CASES = [(32768, 4, 1, False), (4096, 2, 16, True), (256, 7, 1, True), (8, 4, 64, True)]
for programs, group, page, split in CASES:
    config = default_config(programs, 128, 2)
    absent = "" if split else "partial order"
    attention |= dict(TOKENS=config.tokens, STAGES=config.num_stages, AHEAD=config.ahead)
    check(decode_attention_triton.attend_rows, absent, config.num_warps, GROUP=group, GROUP_BLOCK=16,
          PAGE=page, ORDERED=split, SPLIT=split, **attention)
for programs in (8, 4096):
    config = default_config(programs, 256, 2)
    wide = attention | dict(DIM=256, DIM_BLOCK=256)
    wide |= dict(TOKENS=config.tokens, STAGES=config.num_stages, AHEAD=config.ahead)
    check(decode_attention_triton.attend_rows, "partial", config.num_warps, SMALL, GROUP=4, GROUP_BLOCK=16,
          PAGE=16, ORDERED=True, SPLIT=False, **wide)
check(row_order_triton.rank_rows, ROWS=32, OTHERS=256)
long = decode_attention_long_triton
check(long.find_rows, PIECE=512, MAX_ROWS=256, BLOCK=8192, warps=8)
for group, dim, page in [(4, 128, 1), (7, 80, 16)]:
    check(long.attend_pieces, GROUP=group, GROUP_BLOCK=16, KV_HEADS=8, DIM=dim, DIM_BLOCK=128, PAGE=page,
          TOKENS=16, AHEAD=False, PIECE=512, MAX_ROWS=256, STAGES=5, UPCAST=False, warps=1)
check(long.merge_rows, Q_HEADS=32, DIM=80, DIM_BLOCK=128, PIECE=512, BLOCK=16)
check(decode_attention_triton.merge_pieces, Q_HEADS=32, DIM=80, DIM_BLOCK=128, TOKENS=32, SPLIT_TOKENS=256,
      SPLITS_BLOCK=16)
for queries, group, page in [(64, 4, 1), (16, 7, 16)]:
    check(prefill_attention_triton.attend_chunks, GROUP=group, KV_HEADS=8, DIM=80, DIM_BLOCK=128, PAGE=page,
          QUERIES=queries, TOKENS=64, STAGES=prefill_attention_triton.NUM_STAGES, UPCAST=False)
for dim in (128, 256):
    check(prefill_attention_triton.attend_chunks, card=SMALL, GROUP=4, KV_HEADS=8, DIM=dim, DIM_BLOCK=dim,
          PAGE=16, QUERIES=64, TOKENS=prefill_attention_triton.key_tile(dim, 2),
          STAGES=prefill_attention_triton.NUM_STAGES, UPCAST=False)
check(rmsnorm_triton.norm_rows, HIDDEN=1000, BLOCK=1024, ADD=True)
check(rmsnorm_triton.norm_rows, "residual", HIDDEN=4096, BLOCK=4096, ADD=False, warps=8)
check(silu_mul_triton.silu_mul_block, SIZE=3000, BLOCK=1024)
heads = dict(Q_HEADS=14, KV_HEADS=2, DIM=80, DIM_BLOCK=128, HEADS=8)
check(rope_triton.rope_heads, NORM=True, STORE=True, **heads)
check(rope_triton.rope_heads, "q_norm k_norm v k_pool v_pool slot_mapping", NORM=False, STORE=False, **heads)
check(sample_triton.reduce_chunks, CHUNK=4096, DRAW_BLOCK=256)
for absent in ("", "offsets"):
    check(sample_triton.choose_tokens, absent, HAS_OFFSETS=not absent, NUM_STOPS=16, STOPS_BLOCK=16,
          CHUNK=4096, DRAW_BLOCK=256, CHUNKS_BLOCK=64, BLOCKS_BLOCK=1024)
"""


def test_every_model_kernel_compiles_for_hopper(tmp_path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = {line.split()[0] for line in done.stdout.splitlines()}
    assert kernels == {
        "attend_rows",
        "rank_rows",
        "attend_pieces",
        "find_rows",
        "merge_rows",
        "merge_pieces",
        "attend_chunks",
        "norm_rows",
        "silu_mul_block",
        "rope_heads",
        "reduce_chunks",
        "choose_tokens",
    }
