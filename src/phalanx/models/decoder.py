"""One decoder-only transformer for Llama, Mistral, Qwen2, Qwen3 and their kin, told apart by flags."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.attention.base import AttentionBackend, ForwardBatch
from phalanx.config.groups import ModelConfig
from phalanx.core.errors import ModelError
from phalanx.kernels import rope, store_kv
from phalanx.kernels.checks import numba_problem
from phalanx.kvcache.pool import KVPool
from phalanx.layers.embedding import Embedding
from phalanx.layers.linear import Linear
from phalanx.layers.mlp import GatedMLP
from phalanx.layers.rmsnorm import RMSNorm
from phalanx.layers.rope import RotaryEmbedding, apply_rope

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all layers of one step share.

    rotation: (cos, signed_sin) of `RotaryEmbedding.tables`; in fused kernels (positions, `cache`) instead.
    """

    rotation: tuple[torch.Tensor, torch.Tensor]
    slot_mapping: torch.Tensor
    pool: KVPool
    attn: AttentionBackend
    attn_state: Any


class AttentionBlock:
    """Projections around attention: QKV, optional q/k norm, RoPE, the KV store, output."""

    def __init__(self, config: ModelConfig, index: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.index = index
        self.num_q_heads, self.num_kv_heads = config.num_q_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        shards = {"q_proj": config.q_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
        self.qkv = Linear(config.hidden_size, shards, bias=config.attention_bias, dtype=dtype, device=device)
        self.out = Linear(
            config.q_size,
            {"o_proj": config.hidden_size},
            bias=config.attention_out_bias,
            dtype=dtype,
            device=device,
        )
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype=dtype, device=device)

    def targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint name -> the view to fill; `prefix` ends in a dot."""
        found = self.qkv.targets(prefix) | self.out.targets(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            found |= self.q_norm.targets(f"{prefix}q_norm") | self.k_norm.targets(f"{prefix}k_norm")
        return found

    def pack(self) -> None:
        """Pack the weights; see `Linear.pack`."""
        self.qkv.pack()
        self.out.pack()

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, step: StepContext) -> torch.Tensor:
        """x, residual: [num_tokens, hidden_size]. Returns residual + attention(x)."""
        num_tokens = x.shape[0]
        num_qk = self.num_q_heads + self.num_kv_heads
        heads = self.qkv(x).view(num_tokens, num_qk + self.num_kv_heads, self.head_dim)
        qk, v = heads[:, :num_qk], heads[:, num_qk:]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk[:, : self.num_q_heads], qk[:, self.num_q_heads :]
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        qk = apply_rope(qk, *step.rotation)
        q, k = qk[:, : self.num_q_heads], qk[:, self.num_q_heads :]
        store_kv(k, v, step.pool.k[self.index], step.pool.v[self.index], step.slot_mapping)
        attended = step.attn.forward(self.index, q, step.pool, step.attn_state)
        return self.out(attended.reshape(num_tokens, self.num_q_heads * self.head_dim), add=residual)

    def fused(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """x: [num_tokens, hidden_size]. Returns attention(x), without the residual.

        Norms, rotation and the KV store are one launch; Q is rotated where the projection left it.
        """
        num_tokens, num_q, num_kv = x.shape[0], self.num_q_heads, self.num_kv_heads
        heads = self.qkv(x).view(num_tokens, num_q + 2 * num_kv, self.head_dim)
        q, k, v = heads.split((num_q, num_kv, num_kv), dim=1)
        positions, cache = step.rotation
        rope(
            q,
            k,
            positions,
            cache,
            q_norm=None if self.q_norm is None else self.q_norm.weight,
            k_norm=None if self.k_norm is None else self.k_norm.weight,
            eps=0.0 if self.q_norm is None else self.q_norm.eps,
            v=v,
            k_pool=step.pool.k[self.index],
            v_pool=step.pool.v[self.index],
            slot_mapping=step.slot_mapping,
        )
        attended = step.attn.forward(self.index, q, step.pool, step.attn_state)
        return self.out(attended.reshape(num_tokens, num_q * self.head_dim))


class DecoderLayer:
    """Pre-norm attention and feed-forward, each with a residual connection."""

    def __init__(self, config: ModelConfig, index: int, *, dtype: torch.dtype, device: torch.device) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.attention = AttentionBlock(config, index, dtype=dtype, device=device)
        self.post_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.mlp = GatedMLP(size, config.intermediate_size, bias=config.mlp_bias, dtype=dtype, device=device)

    def targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint name -> the view to fill; `prefix` ends in a dot."""
        return (
            self.input_norm.targets(f"{prefix}input_layernorm")
            | self.attention.targets(f"{prefix}self_attn.")
            | self.post_norm.targets(f"{prefix}post_attention_layernorm")
            | self.mlp.targets(f"{prefix}mlp.")
        )

    def pack(self) -> None:
        """Pack the weights; see `Linear.pack`."""
        self.attention.pack()
        self.mlp.pack()

    def __call__(self, hidden: torch.Tensor, step: StepContext) -> torch.Tensor:
        """hidden: [num_tokens, hidden_size], the residual stream. Returns the same."""
        hidden = self.attention(self.input_norm(hidden), hidden, step)
        return self.mlp(self.post_norm(hidden), hidden)


class Decoder:
    """The model. Build it, call `load_weights` once, then `forward` and `logits` per step.

    Args:
        config: shape and flags.
        dtype: of weights and activations.
        device: where they live.
        fused: run norms, rotation and activation through `phalanx.kernels`; None: on CUDA, and on a CPU where
            numba has them in this dtype.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, fused: bool | None = None
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self._compiled = device.type == "cpu" and numba_problem(dtype) is None
        self._fused = device.type == "cuda" or self._compiled if fused is None else fused
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.rope = RotaryEmbedding(
            config.rope, config.head_dim, config.max_position_embeddings, dtype=dtype, device=device
        )
        self.layers = [
            DecoderLayer(config, index, dtype=dtype, device=device) for index in range(config.num_layers)
        ]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.head = Linear(config.hidden_size, {"lm_head": config.vocab_size}, dtype=dtype, device=device)
        self._loaded = False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill the model from (checkpoint name, tensor) pairs, in any order, any float dtype.

        Of a tied model either the embedding or `lm_head.weight` is enough; where a checkpoint holds both they
        are taken as they are, which for equal ones is tying and for different ones is what transformers does.
        Raises ModelError for a missing, unknown, doubled or misshapen tensor, and when loaded already.
        """
        if self._loaded:
            raise ModelError("this model has its weights already; build a new one to load others")
        targets = self._targets()
        expected = set(targets)
        for name, tensor in weights:
            target = targets.pop(name, None)
            if target is None:
                raise ModelError(f"tensor {name} {'comes twice' if name in expected else 'is not expected'}")
            if target.shape != tensor.shape:
                raise ModelError(f"tensor {name} has shape {list(tensor.shape)}, not {list(target.shape)}")
            if not tensor.is_floating_point():
                raise ModelError(f"tensor {name} has dtype {tensor.dtype}, not a float one")
            target.copy_(tensor)
        if self.config.tie_word_embeddings:
            _tie(targets, self.embed, self.head)
        if targets:
            names = ", ".join(sorted(targets)[:4])
            raise ModelError(f"the checkpoint lacks {len(targets)} tensors: {names}")
        for layer in self.layers:
            layer.pack()
        self.head.pack()
        if self._compiled and self._fused:
            self._compile()
        self._loaded = True

    def _compile(self) -> None:
        from phalanx.kernels import cpu_warm_up

        start = time.perf_counter()
        config = self.config
        group = config.num_q_heads // config.num_kv_heads
        cpu_warm_up.compile_kernels(self.dtype, group, config.head_dim, config.qk_norm)
        logger.info(
            "CPU kernels: ready after %.1f s (kept on disk for the next start)", time.perf_counter() - start
        )

    def forward(self, batch: ForwardBatch, pool: KVPool, attn: AttentionBackend) -> torch.Tensor:
        """Run one step; K and V of its tokens are written to `pool`.

        Returns the final-normed hidden states of `batch.logits_index`: [S, hidden_size].
        """
        hidden = self.embed(batch.input_ids)
        if self._fused:
            rotation = batch.positions, self.rope.cache
        else:
            rotation = self.rope.tables(batch.positions)
        step = StepContext(rotation, batch.slot_mapping, pool, attn, attn.begin(batch, pool))
        if self._fused:
            return self._run_fused(hidden, batch.logits_index, step)
        for layer in self.layers:
            hidden = layer(hidden, step)
        return self.norm(_pick(hidden, batch.logits_index))

    def _run_fused(
        self, residual: torch.Tensor, logits_index: torch.Tensor | None, step: StepContext
    ) -> torch.Tensor:
        """Each addition to the residual stream is one launch with the norm after it."""
        x = self.layers[0].input_norm.fused(residual)
        following = [layer.input_norm for layer in self.layers[1:]]
        for layer, next_norm in zip(self.layers, [*following, None], strict=True):
            x = layer.attention.fused(x, step)
            x = layer.mlp.fused(layer.post_norm.add_to(x, residual))
            if next_norm is not None:
                x = next_norm.add_to(x, residual)
        return self.norm.add_to(_pick(x, logits_index), _pick(residual, logits_index))

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: [S, hidden_size] from `forward`. Returns [S, vocab_size] in the compute dtype.

        out: where to write them, on CUDA.
        """
        return self.head(hidden) if out is None else self.head.into(hidden, out)

    def _targets(self) -> dict[str, torch.Tensor]:
        """Checkpoint name -> the tensor or view to fill, for the whole model."""
        found = self.embed.targets("model.embed_tokens") | self.norm.targets("model.norm")
        found |= self.head.targets("")
        for index, layer in enumerate(self.layers):
            found |= layer.targets(f"model.layers.{index}.")
        return found


def _pick(hidden: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    return hidden if index is None else hidden.index_select(0, index)


def _tie(missing: dict[str, torch.Tensor], embedding: Embedding, head: Linear) -> None:
    """Share the one of the two that the checkpoint left out, and take it off `missing`."""
    if missing.keys() >= {"model.embed_tokens.weight", "lm_head.weight"}:
        return
    if missing.pop("lm_head.weight", None) is not None:
        head.weight = embedding.weight
    elif missing.pop("model.embed_tokens.weight", None) is not None:
        embedding.weight = head.weight
