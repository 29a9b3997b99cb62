"""The settled facts of a run, in small frozen groups. Nothing here is "auto" any more.

All groups are msgspec structs, so that they cross process boundaries and `/server_info` as plain JSON.
"""

from __future__ import annotations

import msgspec

PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64)  # tokens


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding of a checkpoint.

    kind: "default", "linear" (divide by factor) or "llama3" (Llama 3.1's frequency-dependent scaling).
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and flags of one decoder-only model.

    Attributes:
        architecture: as in the checkpoint, e.g. "LlamaForCausalLM".
        attention_bias: q, k and v have a bias. attention_out_bias: o has one. mlp_bias: gate, up, down have.
        qk_norm: RMSNorm over head_dim on q and k before RoPE (Qwen3).
        sliding_window: the active window in tokens, or None.
        eos_token_ids: the model's own end tokens (generation config first).
        dtype: the checkpoint's dtype, "bfloat16", "float16" or "float32" ("bfloat16" if quantised).
        quantization: the GGUF block type of the projections ("Q4_1"), dequantised at load; None for floats.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "bfloat16"
    quantization: str | None = None

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads (and of all value heads)."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_weights(self) -> int:
        """Weights of the model, those of a tied embedding once. Left out: biases and the norms of heads."""
        attention = self.hidden_size * 2 * (self.q_size + self.kv_size)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        tables = 1 if self.tie_word_embeddings else 2
        return self.num_layers * layer + (tables * self.vocab_size + 1) * self.hidden_size

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of K and V that one token takes over all layers."""
        return 2 * self.num_layers * self.kv_size * dtype_bytes


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where a model's parts lie.

    Attributes:
        name: what the user typed.
        load_format: "safetensors", "gguf" or "dummy".
        path: the folder or .gguf file; for a dummy model the built-in name or a folder with config.json.
        tokenizer_path: a folder or .gguf file, or "dummy".
        revision: hub revision, or None.
    """

    name: str
    load_format: str
    path: str
    tokenizer_path: str
    revision: str | None = None


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The KV pool. max_total_tokens: pool size in tokens, None where the engine sizes it from free memory.

    mem_fraction_static: share of memory that weights and pool may take together.
    """

    page_size: int
    max_total_tokens: int | None
    mem_fraction_static: float
    dtype: str


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Admission and step shape.

    Attributes:
        max_running_requests: rows of the request table (row 0, padding, not counted).
        context_length: prompt plus output of one request, in tokens.
        max_prefill_tokens: prompt tokens in one step; a longer unchunked prompt runs as the only prefill.
        chunked_prefill_size: prompt tokens of all chunks in one step; -1 never splits a prompt.
        max_queued_requests: waiting requests beyond which new ones get a 503; None is unbounded.
        grant_tokens: KV room is granted to decoding rows in blocks of this many tokens.
    """

    max_running_requests: int
    context_length: int
    max_prefill_tokens: int = 16384
    chunked_prefill_size: int = -1
    schedule_policy: str = "fcfs"
    max_queued_requests: int | None = None
    grant_tokens: int = 16


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How steps run.

    device: "cpu", "cuda" or "null" (emits tokens without a model, for benchmarks).
    dtype: compute dtype. overlap: launch step i+1 before step i is read.
    attention_backend: "numba", "torch_native", "triton" or "flashinfer".
    kv_indices_backend: builds the page lists that flashinfer reads: "fused", "triton", "torch" or "naive";
    None where attention needs no lists.
    null_step_ms: the length of a step of device "null", None for as short as can be.
    cuda_graph: decode steps of up to cuda_graph_max_bs rows replay a captured graph; 0 where there are none.
    """

    device: str
    dtype: str
    attention_backend: str
    overlap: bool
    cuda_graph: bool
    random_seed: int
    num_threads: int | None = None
    cuda_graph_max_bs: int = 0
    kv_indices_backend: str | None = None
    null_step_ms: float | None = None

    @property
    def prepares_inside(self) -> bool:
        """A captured step can build on the device all that attention reads."""
        return self.kv_indices_backend in (None, "fused")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP side.

    cors_allow_origins: origins of web pages that may use the server; ("*",) for all.
    request_timeout_s: the time in which a request must be answered in full; None for as long as it takes.
    log_requests_level: 0 to 3, of what is logged of each request; None logs nothing of any.

    api_workers: processes that share the port.
    shutdown_timeout_s: how long running requests may go on after SIGTERM.
    watchdog_timeout_s: a step of the engine that lasts longer ends the server; 0 for never.
    """

    host: str
    port: int
    served_model_name: str
    api_key: str | None = None
    cors_allow_origins: tuple[str, ...] = ("*",)
    request_timeout_s: float | None = None
    enable_cache_report: bool = False
    log_requests_level: int | None = None
    log_requests_format: str = "text"
    api_workers: int = 1
    shutdown_timeout_s: float = 30.0
    watchdog_timeout_s: float = 300.0
    log_level: str = "info"
    skip_tokenizer_init: bool = False
    chat_template: str | None = None
    stream_interval: int = 1
    incremental_streaming_output: bool = False
    max_body_bytes: int = 64 * 2**20


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was settled at start. choices: one line per "auto", with the reason."""

    source: ModelSource
    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    engine: EngineConfig
    server: ServerConfig
    choices: tuple[str, ...] = ()
