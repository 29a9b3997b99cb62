"""What the device keeps of each row between steps. The engine alone writes it."""

from __future__ import annotations

import torch

from phalanx.config.groups import SchedulerConfig
from phalanx.core.step import Int32, Int64, PageGrants, PrefillChunks
from phalanx.sampling.tensors import int32_table, to_device


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

    def grant(self, grants: PageGrants) -> None:
        """Put granted pages into the rings."""
        if len(grants.rows):
            column = grants.page_index % self.granted_pages.shape[1]
            index = (self._long(grants.rows), self._long(column))
            self.granted_pages[index] = to_device(grants.page_ids, torch.int32, self.device)

    def store_prompt(self, prefill: PrefillChunks, token_rows: Int32, positions: Int64) -> None:
        """Record slots and lengths of prompt chunks. token_rows, positions: [sum(lens)], one per token."""
        index = (self._long(token_rows), self._long(positions))
        self.req_to_token[index] = to_device(prefill.slots, torch.int32, self.device)
        lens = to_device(prefill.starts + prefill.lens, torch.int32, self.device)
        self.seq_lens[self._long(prefill.rows)] = lens

    def store_sampled(self, rows: Int32, tokens: torch.Tensor) -> None:
        """Record the tokens just sampled ([s] int32, device): the input of the rows' next decode step."""
        if len(rows):
            self.last_tokens[self._long(rows)] = tokens

    def _long(self, array: Int32 | Int64) -> torch.Tensor:
        return to_device(array, torch.int64, self.device)
