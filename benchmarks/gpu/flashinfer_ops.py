"""FlashInfer's kernels as counterparts of ours, and compiling their modules beforehand, several at once.

usage: python benchmarks/gpu/flashinfer_ops.py MODULE   (compiles one and calls it on small tensors)
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

import torch

EPS = 1e-6
PREFILL_BACKENDS = ("fa2", "fa3")
MODULES = ("norm", "activation", "rope", "page", *PREFILL_BACKENDS)
_FLOAT_WORKSPACE_BYTES = 256 << 20  # a split prefill of 4 query heads a KV head takes up to 70 MB


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    import flashinfer.norm

    flashinfer.norm.fused_add_rmsnorm(x, residual, weight, EPS)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    import flashinfer.norm

    flashinfer.norm.rmsnorm(x, weight, EPS, out=out)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    import flashinfer.activation

    flashinfer.activation.silu_and_mul(gate_up, out=out)


class OneTokenEach:
    """Where a decode step's K and V go, for `append_paged_kv_cache`: pages of one token, one page a row.

    slots: [num_rows] of any integer type. Of a longer row's page list only the last entry would be read.
    """

    def __init__(self, slots: torch.Tensor) -> None:
        count = torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device)
        self.rows, self.indptr = count[:-1].clone(), count
        self.positions = torch.zeros_like(self.rows)
        self.last_page_len = torch.ones_like(self.rows)
        self.indices = slots.to(torch.int32)

    def append(self, k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor) -> None:
        import flashinfer.page

        flashinfer.page.append_paged_kv_cache(
            k,
            v,
            self.rows,
            self.positions,
            (k_pool.unsqueeze(1), v_pool.unsqueeze(1)),
            self.indices,
            self.indptr,
            self.last_page_len,
            kv_layout="NHD",
        )


def rope_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: OneTokenEach,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
) -> None:
    """What our one kernel does, in two launches, or four with the norms of heads; k is rotated in place."""
    import flashinfer.rope

    if q_norm is not None and k_norm is not None:
        rms_norm(q, q_norm, q)
        rms_norm(k, k_norm, k)
    flashinfer.rope.apply_rope_with_cos_sin_cache_inplace(positions, q, k, q.shape[2], cos_sin_cache)
    slots.append(k, v, k_pool, v_pool)


class Prefill:
    """`BatchPrefillWithPagedKVCacheWrapper`, planned once for chunks that are all the ends of their rows.

    chunk_lens, kv_lens: [m] on the CPU. table: [m, max_context] slots, of whole pages. heads: query heads, KV
    heads, head_dim.
    """

    def __init__(
        self,
        backend: str,
        chunk_lens: torch.Tensor,
        kv_lens: torch.Tensor,
        table: torch.Tensor,
        page_size: int,
        heads: tuple[int, int, int],
    ) -> None:
        import flashinfer

        self._page_size = page_size
        workspace = torch.empty(_FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=table.device)
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        pages = -(-kv_lens // page_size)
        first_slots = table[:, ::page_size].cpu()
        taken = torch.arange(first_slots.shape[1]) < pages[:, None]
        self._wrapper.plan(
            _indptr(chunk_lens),
            _indptr(pages),
            (first_slots[taken] // page_size).to(table.device, torch.int32),
            (kv_lens - (pages - 1) * page_size).to(torch.int32),
            *heads,
            page_size,
            causal=True,
            sm_scale=heads[2] ** -0.5,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )

    def run(self, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, out: torch.Tensor) -> None:
        """q, out: [num_tokens, num_q_heads, head_dim]; pools: [num_slots, num_kv_heads, head_dim]."""
        k, v = (pool.unflatten(0, (-1, self._page_size)) for pool in (k_pool, v_pool))
        self._wrapper.run(q, (k, v), out=out)


def _indptr(counts: torch.Tensor) -> torch.Tensor:
    return torch.cat((counts.new_zeros(1), counts.cumsum(0))).to(torch.int32)


def build(module: str) -> None:
    """Compile and load a module. Takes no memory of the GPU where FLASHINFER_CUDA_ARCH_LIST is set."""
    import flashinfer

    if module in PREFILL_BACKENDS:
        kinds = [torch.bfloat16] * 3 + [torch.int32]
        flashinfer.prefill.get_batch_prefill_module(module, *kinds, 128, 128, 0, False, False, False)
    elif module == "activation":
        flashinfer.activation.get_act_and_mul_module("silu")
    else:
        getattr(getattr(flashinfer, module), f"get_{module}_module")()


def call(module: str, device: str) -> None:
    """Call it once on small tensors; waits."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    q, k, v, weight = randn(5, 8, 128), randn(5, 2, 128), randn(5, 2, 128), randn(128)
    k_pool, v_pool, slots = randn(9, 2, 128), randn(9, 2, 128), torch.arange(2, 7, device=device)
    if module == "norm":
        rms_norm(q, weight, q)
        add_rms_norm(q[:, 0], k[:, 0].contiguous(), weight)
    elif module == "activation":
        silu_mul(q[:, 0].contiguous(), randn(5, 64))
    elif module == "page":
        OneTokenEach(slots).append(k, v, k_pool, v_pool)
    elif module == "rope":
        cache = torch.randn(16, 128, device=device)
        rope_and_store(q, k, v, slots, cache, k_pool, v_pool, OneTokenEach(slots))
    else:
        lens = torch.tensor([3, 2])
        table = torch.arange(8, device=device).view(2, 4)
        Prefill(module, lens, lens + 1, table, 1, (8, 2, 128)).run(q, k_pool, v_pool, torch.empty_like(q))
    if device == "cuda":
        torch.cuda.synchronize()


def compile_all() -> bool:
    """Every module in a process of its own, all at once; whether all were compiled and could be called."""
    children = []
    for module in MODULES:
        log = tempfile.TemporaryFile("w+")
        command = [sys.executable, __file__, module]
        children.append((module, log, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)))
    well = True
    for module, log, child in children:
        code = child.wait()
        log.seek(0)
        lines = log.read().strip().splitlines() or ["said nothing"]
        shown = [line for line in lines if code and "error" in line.lower()][:4] + lines[-1:]
        print(
            f"{module}: {f'FAILED, exit code {code}: ' if code else ''}{' | '.join(shown)[:1200]}", flush=True
        )
        well &= not code
    return well


def main() -> int:
    module = sys.argv[1]
    start = time.perf_counter()
    build(module)
    built = time.perf_counter()
    call(module, "cuda")
    called = time.perf_counter()
    print(f"compiled or found in {built - start:.0f} s, called in {called - built:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
