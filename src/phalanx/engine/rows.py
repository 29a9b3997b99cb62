"""What the device keeps of each row between steps. The engine alone writes it."""

from __future__ import annotations

import numpy as np
import torch

from phalanx.config.groups import SchedulerConfig
from phalanx.core.step import Int32, Int64, PageGrants
from phalanx.sampling.tensors import int32_table


def grant_ring(config: SchedulerConfig, page_size: int) -> int:
    """Entries of a row's ring of granted pages.

    The page in use and one block ahead of it, doubled for grants that arrive while steps in flight still
    consume the block before, rounded up to a power of two.
    """
    block = max(1, config.grant_tokens // page_size)
    return 1 << (2 * (block + 1) - 1).bit_length()


class DeviceRows:
    """Columns indexed by row; row 0 is padding. All int32.

    Attributes:
        seq_lens: [num_rows], tokens stored in the KV pool.
        last_tokens: [num_rows], the token sampled last, which the next decode step takes as input.
        req_to_token: [num_rows, max_context], KV slot of each position.
        granted_pages: [num_rows, ring]; page number n of a row lies at n % ring.
    """

    def __init__(self, num_rows: int, max_context: int, ring: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.max_context = max_context
        self.device = device
        self.seq_lens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.req_to_token = int32_table(num_rows, max_context, device)
        self.granted_pages = torch.zeros(num_rows, ring, dtype=torch.int32, device=device)

    def grant_arrays(self, grants: PageGrants) -> dict[str, Int32 | Int64]:
        """What `grant` needs on the device, by name: the place in its row's ring of each page."""
        return {
            "grant_rows": grants.rows.astype(np.int64),
            "grant_columns": (grants.page_index % self.granted_pages.shape[1]).astype(np.int64),
            "grant_pages": grants.page_ids,
        }

    def grant(self, sent: dict[str, torch.Tensor]) -> None:
        """Put granted pages into the rings. sent: device copies of `grant_arrays`."""
        self.granted_pages[sent["grant_rows"], sent["grant_columns"]] = sent["grant_pages"]

    def store_prompt(self, sent: dict[str, torch.Tensor]) -> None:
        """Record slots and lengths of prompt chunks.

        sent: token_rows, positions, slots: [sum(lens)] int64; chunk_rows: [m] int64; chunk_ends: [m] int32.
        """
        self.req_to_token[sent["token_rows"], sent["positions"]] = sent["slots"].int()
        self.seq_lens[sent["chunk_rows"]] = sent["chunk_ends"]

    def store_sampled(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Record the tokens just sampled: the input of the rows' next decode step.

        rows: [s] int64; padding row 0 may come more than once. tokens: [s] int32.
        """
        self.last_tokens.index_copy_(0, rows, tokens)
