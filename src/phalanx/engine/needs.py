"""What an engine takes of memory beside weights and KV pool, counted before any of it is taken."""

from __future__ import annotations

from phalanx.config.groups import Settings
from phalanx.core.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from phalanx.engine.buckets import decode_buckets
from phalanx.engine.captures import captured_steps
from phalanx.engine.memory import DTYPES, EngineNeeds
from phalanx.engine.rows import grant_ring
from phalanx.engine.warm_up import most_prompt_tokens
from phalanx.kernels import sample_workspace_size
from phalanx.kernels.decode_attention_long import LONG_TOKENS, MAX_PIECES
from phalanx.sampling.sampler import scratch_shape

_MiB = 1 << 20
_UNBOUNDED = 1 << 62
# Of a step's token: id, position, slot and row of 8 bytes each, twice, and what else a plan brings.
_TOKEN_BYTES = 128
_LOGPROB_LINES = 64  # logits that `sampling.logprobs` has in work at once
_COPIED_LINES = 512  # logits that the CUDA engine copies for rows that are sampled again
# Of a logit whose log-probability is computed: in fp32 twice, its sort key in int32 and int64 with what each
# operation makes anew, and topk's own.
_LOGPROB_BYTES = 48
# Of a logit that is filtered on CUDA, with torch's sort of whole lines: value, probability and copies of both
# 16; sorted values and indices 12; keys, values and pairs that the sort works with 32.
_FILTER_BYTES = 64
# Of a token of a history that is penalised: id as int32 and as int64 twice, two flags, a count, and its logit
# with what each penalty makes anew.
_HISTORY_BYTES = 40
# A captured kernel: what the driver keeps of it on the device. Logs of vLLM with captured steps of a whole
# model say 8 to 24 MiB a graph (vllm#50780), that is up to 24 KiB a kernel. On an H200 70 graphs of
# qwen3-0.6b and what was loaded for them took 0.14 GiB, 6 KiB a kernel: the rest is for other drivers.
_GRAPH_KERNEL_BYTES = 24 << 10
_KERNELS_PER_LAYER, _OTHER_KERNELS = 12, 24  # `phalanx profile` counts some 9 a layer
# cuBLAS asks for 32 MiB a stream on Hopper, of which there are three; kernels are loaded as they are first
# used, cuBLAS' and torch's by the hundred. A guess: half a GiB, and as much again as the allocator loses to
# blocks of 2 MiB and more.
_LIBRARY_BYTES = 1024 * _MiB
# oneDNN keeps compiled shapes with their scratch: an engine of smollm2 grew by 248 MB (docs/measured.md).
_CPU_LIBRARY_BYTES = 256 * _MiB


def engine_needs(settings: Settings) -> EngineNeeds:
    """Bytes that the engine of these settings takes, beside weights and pool.

    Tables and logits are exact; of a GPU's step, of sampling and of log-probabilities it is the most that
    requests can ask for; graphs and libraries are estimates. Steps and sampling follow each other on one
    stream but are counted side by side, for what an allocator cannot join.
    """
    if settings.engine.device == "cuda":
        return _on_cuda(settings)
    return _on_cpu(settings)


def table_bytes(settings: Settings) -> int:
    """Bytes of `DeviceRows` and `SamplingRows`, the columns of a logit_bias as wide as they can grow."""
    scheduler = settings.scheduler
    num_rows = scheduler.max_running_requests + 1
    request_to_token = history = 4 * scheduler.context_length
    ring = 4 * grant_ring(scheduler, settings.cache.page_size)
    lengths_and_tokens, seeds = 8, 8
    columns = 4 * 6 + 4 * (3 + MAX_STOP_TOKEN_IDS)
    bias = 8 * MAX_LOGIT_BIAS
    row = request_to_token + history + ring + lengths_and_tokens + seeds + columns + bias
    return num_rows * row


def largest_step(settings: Settings) -> int:
    """Tokens of the largest step: every row decodes, padding included, beside the most prompt tokens."""
    scheduler = settings.scheduler
    rows = decode_buckets(scheduler.max_running_requests)[-1]
    return rows + most_prompt_tokens(scheduler, _most_held(settings))


def _most_held(settings: Settings) -> int:
    """Tokens that a pool of the size asked for holds; more than any where none was asked for."""
    asked = settings.cache.max_total_tokens
    return _UNBOUNDED if asked is None else asked


def step_bytes(settings: Settings, num_tokens: int) -> int:
    """The most that the model holds at once in a step of so many tokens, attention's own work left out.

    With norms, rotation and KV store in kernels of their own, as on CUDA.
    """
    model, itemsize = settings.model, DTYPES[settings.engine.dtype].itemsize
    hidden, q_and_kv = model.hidden_size, model.q_size + model.kv_size
    attention = 3 * hidden + 2 * q_and_kv
    mlp = 3 * hidden + 3 * model.intermediate_size
    last_norm = 5 * hidden
    return num_tokens * (itemsize * max(attention, mlp, last_norm) + _TOKEN_BYTES)


def _on_cuda(settings: Settings) -> EngineNeeds:
    model, scheduler, engine = settings.model, settings.scheduler, settings.engine
    rows, vocab = scheduler.max_running_requests, model.vocab_size
    itemsize = DTYPES[engine.dtype].itemsize
    buckets, mixed = captured_steps(settings, _most_held(settings))
    shapes = mixed.all()
    lines = decode_buckets(rows)[-1] + max((shape.chunks for shape in shapes), default=0)
    most_captured = max([*buckets, *(s.lanes + s.tokens for s in shapes)], default=0)
    sampling = 4 * sample_workspace_size(lines, vocab)
    attention = _attention_bytes(settings)
    num_kernels = model.num_layers * _KERNELS_PER_LAYER + _OTHER_KERNELS
    graphs = 0
    if buckets:
        graphs = (len(buckets) + len(shapes)) * num_kernels * _GRAPH_KERNEL_BYTES
        graphs += step_bytes(settings, most_captured) + attention + sampling
    # Kept until their step is read, and the next one is under way by then.
    kept = 2 * rows * vocab * itemsize
    return EngineNeeds(
        num_rows=rows,
        context_length=scheduler.context_length,
        step_tokens=largest_step(settings),
        pool_token=4 if engine.attention_backend == "flashinfer" else 0,  # page lists
        tables=table_bytes(settings),
        logits=lines * vocab * itemsize,
        steps=step_bytes(settings, largest_step(settings)) + attention,
        sampling=sampling + _eager_sampling_bytes(settings) + min(rows, _COPIED_LINES) * vocab * itemsize,
        logprobs=kept + _LOGPROB_LINES * vocab * _LOGPROB_BYTES,
        graphs=graphs,
        libraries=_LIBRARY_BYTES,
    )


def _on_cpu(settings: Settings) -> EngineNeeds:
    """Tables and logits. Steps, sampling and attention are left to what --mem-fraction-static leaves.

    That is half of the memory by default, and a CPU's memory gives way where a GPU's does not: a start that
    would work for all but the largest requests is better than none.
    """
    scheduler, vocab = settings.scheduler, settings.model.vocab_size
    nothing = dict.fromkeys(("pool_token", "steps", "sampling", "logprobs", "graphs"), 0)
    return EngineNeeds(
        num_rows=scheduler.max_running_requests,
        context_length=scheduler.context_length,
        step_tokens=largest_step(settings),
        tables=table_bytes(settings),
        logits=scheduler.max_running_requests * vocab * DTYPES[settings.engine.dtype].itemsize,
        libraries=_CPU_LIBRARY_BYTES,
        **nothing,
    )


def _eager_sampling_bytes(settings: Settings) -> int:
    """What `sampling.sampler` takes of rows that ask for filters and penalties; the scratch is kept."""
    vocab, scheduler = settings.model.vocab_size, settings.scheduler
    chunk, width = scratch_shape(vocab, settings.engine.device)
    lines = min(chunk, scheduler.max_running_requests)
    penalties = 12 * width + _HISTORY_BYTES * min(
        scheduler.context_length, _most_held(settings)
    )  # 12: counts, and a copy of the logits
    return 4 * chunk * width + lines * max(_FILTER_BYTES * width, penalties)


def _attention_bytes(settings: Settings) -> int:
    """What the Triton kernels and FlashInfer work with, beside their output. Not counted: torch_native's."""
    model, context = settings.model, min(settings.scheduler.context_length, _most_held(settings))
    if settings.engine.attention_backend == "flashinfer":
        buckets = decode_buckets(settings.scheduler.max_running_requests)
        return (1 + len(buckets)) * _MiB  # a workspace for all and one for the plan of each
    return 4 * MAX_PIECES * model.num_q_heads * (model.head_dim + 2) if context > LONG_TOKENS else 0
