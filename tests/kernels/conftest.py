"""Triton kernels run compiled where there is a CUDA device, and in Triton's interpreter elsewhere.

Triton decides at import and at `@triton.jit`, so the kernels are imported here with the variable set. It is
set again while this folder's tests run and only then: servers that other tests start inherit the environment.
"""

from __future__ import annotations

import pytest
import torch

INTERPRET = not torch.cuda.is_available()


@pytest.fixture(scope="module", autouse=INTERPRET)
def triton_interpreter():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield


if INTERPRET:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import phalanx.kernels.decode_attention_long_triton
        import phalanx.kernels.decode_attention_triton
        import phalanx.kernels.kv_indices_triton
        import phalanx.kernels.prefill_attention_triton
        import phalanx.kernels.rmsnorm_triton
        import phalanx.kernels.rope_triton
        import phalanx.kernels.row_order_triton
        import phalanx.kernels.sample_triton
        import phalanx.kernels.silu_mul_triton
        import phalanx.kernels.step_prep_triton
        import phalanx.kernels.store_kv_triton  # noqa: F401
