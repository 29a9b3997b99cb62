"""One file per op, tensors in and tensors out; references in reference.py.

Importing this package needs torch alone; Triton is imported when a Triton backend first runs.
"""

from phalanx.kernels.kv_indices import create_kv_indices
from phalanx.kernels.step_prep import StepPrepBuffers, step_prep
from phalanx.kernels.store_kv import gather_kv, store_kv

__all__ = ["StepPrepBuffers", "create_kv_indices", "gather_kv", "step_prep", "store_kv"]
