"""What `/v1/models`, `/model_info` and `/server_info` tell."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

import msgspec

from phalanx.core.version import VERSION
from phalanx.server.state import ApiWorker

WEIGHT_VERSION = "default"  # SGLang's name for weights that nobody replaced
NUM_CACHED_TOKENS = 0  # prompt tokens found in a cache: nothing is cached between requests
_HIDDEN = "(hidden)"
_PAGES = ("total", "free", "cached", "held")


def model_card(worker: ApiWorker) -> dict[str, Any]:
    """OpenAI's model object."""
    server = worker.settings.server
    return {
        "id": server.served_model_name,
        "object": "model",
        "created": int(worker.started_at_s),
        "owned_by": "phalanx",
        "root": worker.settings.source.name,
        "parent": None,
        "max_model_len": worker.settings.scheduler.context_length,
    }


def model_info(worker: ApiWorker) -> dict[str, Any]:
    """SGLang's /model_info."""
    settings = worker.settings
    return {
        "model_path": settings.source.name,
        "tokenizer_path": PurePath(settings.source.tokenizer_path).name,
        "served_model_name": settings.server.served_model_name,
        "is_generation": True,
        "weight_version": WEIGHT_VERSION,
        "model_type": settings.model.architecture,
        "vocab_size": settings.model.vocab_size,
        "context_length": settings.scheduler.context_length,
        "eos_token_ids": list(worker.settler.eos_token_ids),
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }


def tokenizer_info(worker: ApiWorker) -> dict[str, Any]:
    """vLLM's /tokenizer_info: what a client without the tokenizer must know beside /tokenize."""
    tokenizer = worker.require_tokenizer()
    ids = {"bos_token": tokenizer.bos_token_id, "eos_token": next(iter(worker.settler.eos_token_ids), None)}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: None if i is None else tokenizer.id_to_token(i) for name, i in ids.items()},
        "chat_template": tokenizer.chat_template,
    }


def server_info(worker: ApiWorker, stats: dict[str, Any]) -> dict[str, Any]:
    """Every settled setting, flat under SGLang's names and nested as it is kept; the engine's counters.

    Of files only the names are told: where they lie on the server is nobody's business.
    """
    groups: dict[str, Any] = msgspec.to_builtins(worker.settings)
    for group, name in (("source", "path"), ("source", "tokenizer_path"), ("server", "chat_template")):
        if groups[group][name] is not None:
            groups[group][name] = PurePath(groups[group][name]).name
    if groups["server"]["api_key"] is not None:
        groups["server"]["api_key"] = _HIDDEN
    flat: dict[str, Any] = {}
    for name in ("model", "source", "cache", "scheduler", "server", "engine"):  # later ones win a name
        flat |= groups[name]
    source, engine = groups["source"], groups["engine"]
    return {
        **flat,
        "model_path": source["name"],
        "kv_cache_dtype": groups["cache"]["dtype"],
        "disable_overlap_schedule": not engine["overlap"],
        "disable_cuda_graph": not engine["cuda_graph"],
        "disable_radix_cache": True,
        **groups,
        "kv_cache": kv_cache(stats),
        "internal_states": [stats],
        "startup_time": worker.started_at_s,
        "version": VERSION,
    }


def kv_cache(stats: dict[str, Any]) -> dict[str, int]:
    """Pages of the KV pool: free + cached + held = total."""
    pages = {f"{kind}_pages": int(stats.get(f"pages_{kind}", 0)) for kind in _PAGES}
    return {"page_size": int(stats.get("page_size", 0)), **pages}
