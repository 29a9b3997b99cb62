"""One decoder-only transformer for Llama, Mistral, Qwen2, Qwen3 and their kin, told apart by flags."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.attention.base import AttentionBackend, ForwardBatch
from phalanx.config.groups import ModelConfig
from phalanx.core.errors import ModelError
from phalanx.kernels import store_kv
from phalanx.kvcache.pool import KVPool
from phalanx.layers.embedding import Embedding
from phalanx.layers.linear import Linear
from phalanx.layers.mlp import GatedMLP
from phalanx.layers.rmsnorm import RMSNorm
from phalanx.layers.rope import RotaryEmbedding, apply_rope


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all layers of one step share. cos, signed_sin: see `RotaryEmbedding.tables`."""

    cos: torch.Tensor
    signed_sin: torch.Tensor
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
        qk = apply_rope(qk, step.cos, step.signed_sin)
        q, k = qk[:, : self.num_q_heads], qk[:, self.num_q_heads :]
        store_kv(k, v, step.pool.k[self.index], step.pool.v[self.index], step.slot_mapping)
        attended = step.attn.forward(self.index, q, step.pool, step.attn_state)
        return self.out(attended.reshape(num_tokens, self.num_q_heads * self.head_dim), add=residual)


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
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
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
        self._loaded = True

    def forward(self, batch: ForwardBatch, pool: KVPool, attn: AttentionBackend) -> torch.Tensor:
        """Run one step; K and V of its tokens are written to `pool`.

        Returns the final-normed hidden states of `batch.logits_index`: [S, hidden_size].
        """
        cos, signed_sin = self.rope.tables(batch.positions)
        step = StepContext(cos, signed_sin, batch.slot_mapping, pool, attn, attn.begin(batch, pool))
        hidden = self.embed(batch.input_ids)
        for layer in self.layers:
            hidden = layer(hidden, step)
        return self.norm(hidden.index_select(0, batch.logits_index))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [S, hidden_size] from `forward`. Returns [S, vocab_size] in the compute dtype."""
        return self.head(hidden)

    def _targets(self) -> dict[str, torch.Tensor]:
        """Checkpoint name -> the tensor or view to fill, for the whole model."""
        found = self.embed.targets("model.embed_tokens") | self.norm.targets("model.norm")
        found |= self.head.targets("")
        for index, layer in enumerate(self.layers):
            found |= layer.targets(f"model.layers.{index}.")
        return found


def _tie(missing: dict[str, torch.Tensor], embedding: Embedding, head: Linear) -> None:
    """Share the one of the two that the checkpoint left out, and take it off `missing`."""
    if missing.keys() >= {"model.embed_tokens.weight", "lm_head.weight"}:
        return
    if missing.pop("lm_head.weight", None) is not None:
        head.weight = embedding.weight
    elif missing.pop("model.embed_tokens.weight", None) is not None:
        embedding.weight = head.weight
