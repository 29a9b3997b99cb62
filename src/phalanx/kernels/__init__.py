"""One file per op, tensors in and tensors out; references in reference.py.

Importing this package needs torch alone; Triton is imported when a Triton backend first runs.
"""

from phalanx.kernels.decode_attention import (
    DecodeConfig,
    decode_attention,
    decode_workspace_size,
)
from phalanx.kernels.decode_attention_long import LongRows, find_long_rows
from phalanx.kernels.kv_indices import create_kv_indices
from phalanx.kernels.prefill_attention import PrefillTiles, prefill_attention, prefill_tiles
from phalanx.kernels.rmsnorm import add_rms_norm, rms_norm
from phalanx.kernels.rope import rope
from phalanx.kernels.row_order import longest_first
from phalanx.kernels.sample import sample, sample_workspace_size
from phalanx.kernels.silu_mul import silu_mul
from phalanx.kernels.step_prep import StepPrepBuffers, step_prep
from phalanx.kernels.store_kv import gather_kv, store_kv

__all__ = [
    "DecodeConfig",
    "LongRows",
    "PrefillTiles",
    "StepPrepBuffers",
    "add_rms_norm",
    "create_kv_indices",
    "decode_attention",
    "decode_workspace_size",
    "find_long_rows",
    "gather_kv",
    "longest_first",
    "prefill_attention",
    "prefill_tiles",
    "rms_norm",
    "rope",
    "sample",
    "sample_workspace_size",
    "silu_mul",
    "step_prep",
    "store_kv",
]
