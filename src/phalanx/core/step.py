"""The two messages between scheduler and engine: StepPlan forward, StepResult back.

Both are structs of NumPy arrays. A *row* is a slot of the request table (`req_pool_indices` in SGLang):
stable while a request lives, the same number on the host and on the device. Row 0 and page 0 are padding and
never belong to a request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]
Bool = npt.NDArray[np.bool_]


class Finish(IntEnum):
    """Why a sequence ended. NONE: it goes on."""

    NONE = 0
    STOP = 1  # a stop token was sampled (found on the device)
    LENGTH = 2  # max_new_tokens or the context is used up (known to the scheduler)
    ABORT = 3  # the client left, or asked for it
    ERROR = 4  # its logits were not finite, or the step failed


@dataclass(frozen=True, slots=True)
class EnteringRows:
    """Device columns of rows that enter the table with this step: sent once per request.

    All arrays are [k], ordered alike; ragged parts are CSR.
    """

    rows: Int32
    temperature: Float32  # 0 where greedy
    top_p: Float32
    top_k: Int32  # -1 is off
    min_p: Float32
    frequency_penalty: Float32
    presence_penalty: Float32
    repetition_penalty: Float32
    min_new_tokens: Int32
    seed: Int64
    prompt_lens: Int32
    stop_indptr: Int32  # [k+1]
    stop_ids: Int32  # [stop_indptr[-1]]
    bias_indptr: Int32  # [k+1]
    bias_ids: Int32
    bias_values: Float32

    @property
    def count(self) -> int:
        """Number of entering rows."""
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class PrefillChunks:
    """Prompt chunks that ride along in this step; one chunk per row at most.

    rows, starts, lens, is_last: [m]; chunk i covers prompt positions starts[i] .. starts[i]+lens[i]-1.
    input_ids, slots: [sum(lens)] int32, chunk after chunk: the tokens, and the KV slot of each.
    is_last: the prompt ends with this chunk, so the row samples its first token in this step.
    """

    rows: Int32
    starts: Int32
    lens: Int32
    is_last: Bool
    input_ids: Int32
    slots: Int32

    @property
    def count(self) -> int:
        """Number of chunks."""
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class PageGrants:
    """Pages granted ahead to decoding rows. Grant g: page number page_index[g] of row rows[g] is page_ids[g].

    Position t of a row lies in page number t // page_size, at offset t % page_size. Every page that decode
    writes into is granted, in the step of its first decode token at the latest: the partly filled last page
    of a prompt too (with the prompt's last chunk). Never more than one block, max(1, grant_tokens //
    page_size) pages, lies ahead of a row's position; a row's grants come in the order of page_index, without
    a gap.
    """

    rows: Int32
    page_index: Int32
    page_ids: Int32


@dataclass(frozen=True, slots=True)
class LogprobPlan:
    """Rows of this step that want log-probabilities of the raw logits.

    Output: sample_index: [q] positions in `StepPlan.sample_rows`, ascending; top_k: [q]; the asked-for token
    ids are CSR over q (ids_indptr: [q+1], ids). The result's `logprobs` has these q positions in this order,
    with `index` = sample_index.

    Prompt: position p's log-probability is that of prompt token p given those before it, so it comes from the
    logits of position p - 1, and position 0 has none. A chunk of positions a .. b-1 delivers positions
    max(a + 1, first wanted) .. min(b, prompt_len - 1). Listed are the r chunks that deliver at least one:
    prompt_chunk: [r] indices into PrefillChunks, ascending; prompt_start: [r] first position delivered;
    prompt_indptr: [r+1] CSR of prompt_targets, the prompt tokens at the delivered positions (the last one may
    be the first token of the next chunk, so the engine cannot know it). Target j of chunk i needs the logits
    of the chunk's token number prompt_start[i] + j - 1 - PrefillChunks.starts[prompt_chunk[i]].
    prompt_top_k: [r]; the ids asked for at each position of chunk i are CSR over r. The result's
    `prompt_logprobs` has one position per target, in this order, `token_ids` = prompt_targets, `index` = the
    chunk.
    """

    sample_index: Int32
    top_k: Int32
    ids_indptr: Int32
    ids: Int32
    prompt_chunk: Int32
    prompt_start: Int32
    prompt_top_k: Int32
    prompt_ids_indptr: Int32
    prompt_ids: Int32
    prompt_indptr: Int32  # [r+1]
    prompt_targets: Int32  # [prompt_indptr[-1]]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the engine does in one step.

    Attributes:
        step_id: counts up by one.
        decode_rows: [n] int32, rows that take one token each; the engine reads their last token and length
            from its own device columns.
        entering, prefill, grants, logprobs: see their classes; applied in the order entering, grants,
            prefill.
        sample_rows: [n + number of last chunks] int32: decode_rows, then rows of chunks with is_last. The
            order of everything in StepResult.
            A prompt with max_new_tokens 0 samples too; the scheduler drops the token.
        num_generated: [len(sample_rows)] int32, output tokens each sampled row has before this step (known to
            the host without reading results).
        needs_eager: [len(sample_rows)] bool, rows that ask for more than greedy or plain temperature
            sampling (filters, penalties, bias, min_new_tokens, log-probabilities).
    """

    step_id: int
    decode_rows: Int32
    entering: EnteringRows
    prefill: PrefillChunks
    grants: PageGrants
    sample_rows: Int32
    num_generated: Int32
    needs_eager: Bool
    logprobs: LogprobPlan | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that run through the model in this step."""
        return len(self.decode_rows) + len(self.prefill.input_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at q positions.

    index: [q] int32, what the position belongs to (an index into sample_rows, or for prompts into chunks).
    token_ids, logprobs: [q], the chosen (or prompt) token and its log-probability.
    top_indptr: [q+1]; top_ids, top_logprobs: the top_k alternatives, likeliest first.
    ids_indptr: [q+1]; ids, ids_logprobs: the asked-for token ids, in the order asked.
    """

    index: Int32
    token_ids: Int32
    logprobs: Float32
    top_indptr: Int32
    top_ids: Int32
    top_logprobs: Float32
    ids_indptr: Int32
    ids: Int32
    ids_logprobs: Float32


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step produced, in the order of `StepPlan.sample_rows`.

    tokens: [s] int32. finish: [s] uint8, NONE, STOP or ERROR (the scheduler alone knows LENGTH and ABORT).
    """

    step_id: int
    tokens: Int32
    finish: UInt8
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What `Scheduler.apply` hands on to the API workers: one struct of arrays per step.

    stream_ids: [n] int64; tokens: [n] int32 (-1: no token, only an end); finish: [n] uint8 (Finish).
    logprobs, prompt_logprobs: as in StepResult, but `index` points into stream_ids. Prompt log-probabilities
    of a chunked prompt come in several steps, chunk by chunk, positions ascending and without a gap; those of
    a chunk that is not the last, with a token of -1 and finish NONE. A stream id stands here once at most.
    errors: messages for stream ids that ended in ERROR or ABORT with something to say: (stream_id, status,
    message).
    """

    step_id: int
    stream_ids: Int64
    tokens: Int32
    finish: UInt8
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    errors: tuple[tuple[int, int, str], ...] = field(default=())
