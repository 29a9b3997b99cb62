"""What weights, engine and KV pool take of a device's memory, counted before they take it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from phalanx.attention.base import ForwardBatch
from phalanx.attention.registry import create_attention
from phalanx.config.cli import build_parser
from phalanx.config.groups import CacheConfig, ModelSource, Settings
from phalanx.config.hardware import Hardware
from phalanx.config.resolve import resolve
from phalanx.core.errors import ConfigError
from phalanx.core.sampling_params import MAX_LOGIT_BIAS
from phalanx.engine import build
from phalanx.engine.captures import captured_steps
from phalanx.engine.cuda import CudaEngine
from phalanx.engine.memory import (
    EngineNeeds,
    available_bytes,
    check_memory,
    size_pool,
    weight_bytes,
)
from phalanx.engine.needs import engine_needs, step_bytes, table_bytes
from phalanx.engine.rows import DeviceRows, grant_ring
from phalanx.kvcache.pool import KVPool
from phalanx.models.decoder import Decoder
from phalanx.models.dummy import BUILTIN_CONFIGS
from phalanx.models.weights import iter_dummy_weights
from phalanx.runtime.build import build_worker
from phalanx.sampling.rows import SamplingRows
from tests.models import cuda_rig as cuda_cases
from tests.models.stand_in_cuda import stand_in
from tests.unit.test_engine import CONFIG, CPU, settings

GiB = 2**30
GPU = Hardware(num_cpus=16, cpu_has_bf16=True, gpu_name="GPU", has_triton=True, has_flashinfer=True)
# What a process finds free on cards of 24, 40, 80 and 141 GB; of an H200 as measured.
CARDS = {24: 23.5, 40: 39.0, 80: 78.7, 141: 139.8}


def settle(name: str, flags: str = "", hardware: Hardware = GPU) -> Settings:
    source = ModelSource(name=name, load_format="dummy", path=name, tokenizer_path="dummy")
    args = build_parser().parse_args(f"--model {name} --load-format dummy {flags}".split())
    return resolve(args, hardware, source, BUILTIN_CONFIGS[name])


def needs_of(total: int, pool_token: int = 0) -> EngineNeeds:
    nothing = dict.fromkeys(EngineNeeds.__slots__, 0)
    return EngineNeeds(**nothing | {"tables": total, "pool_token": pool_token})


def pool_bytes(chosen: Settings, num_pages: int) -> int:
    return num_pages * chosen.cache.page_size * chosen.model.kv_bytes_per_token(2)


def test_pool_sizing() -> None:
    one_page = CONFIG.kv_bytes_per_token(4) * 4

    def pages(fraction: float, total: int | None, start: int, now: int, engine: int = 0, **more: int) -> int:
        cache = CacheConfig(
            page_size=4, max_total_tokens=total, mem_fraction_static=fraction, dtype="float32"
        )
        needs = needs_of(engine * one_page, **more)
        start, now = start * one_page, now * one_page
        size = size_pool(settings(4, cache=cache), needs, available_at_start=start, available_now=now)
        # The engine is named where it bounds the pool, and only there.
        assert bool(size.note) == (total is None and needs.total > (1 - fraction) * start)
        return size.num_pages

    # 100 pages free at the start, 10 taken by weights, 50 stay free: 40 for the pool.
    assert pages(0.5, None, 100, 90) == 40
    assert pages(0.5, None, 100, 90, engine=50) == 40
    assert pages(0.5, None, 100, 90, engine=51) == 39
    assert pages(0.9, None, 100, 90, engine=88) == 2  # one page, and page 0
    assert pages(0.9, None, 10**9, 10**9, engine=10) == 61  # no more than all rows can use
    assert pages(0.5, 42, 100, 90) == 11  # 10 whole pages and the padding page
    assert pages(0.5, 42, 100, 90, engine=79) == 11
    assert pages(0.5, None, 100, 90, pool_token=CONFIG.kv_bytes_per_token(4)) == 20
    with pytest.raises(ConfigError, match=r"--max-total-tokens 42 .* lower --max-total-tokens, "):
        pages(0.5, 42, 100, 90, engine=80)
    with pytest.raises(ConfigError, match="--max-total-tokens 4000"):
        pages(0.5, 4000, 100, 90)
    with pytest.raises(ConfigError, match=r"no memory is left .* --mem-fraction-static is 0\.1: raise it"):
        pages(0.1, None, 100, 90)
    with pytest.raises(ConfigError, match=r"beside the weights.*smallest.* lower --max-running-requests, "):
        pages(0.9, None, 100, 90, engine=89)


@pytest.mark.parametrize("name", sorted(BUILTIN_CONFIGS))
def test_weights_are_counted_before_they_are_loaded(name: str) -> None:
    config = msgspec.structs.replace(BUILTIN_CONFIGS[name], num_layers=2)
    with torch.device("meta"):
        decoder = Decoder(config, dtype=torch.bfloat16, device=torch.device("meta"))
    targets = decoder._targets()
    if config.tie_word_embeddings:
        del targets["lm_head.weight"]
    counted, real = weight_bytes(config, 2), sum(t.numel() * 2 for t in targets.values())
    assert 0 <= real - counted <= 1e-4 * real  # the norms of heads, and biases


def test_a_model_that_leaves_no_memory_is_refused_before_it_is_loaded() -> None:
    chosen = settings(4)
    size, page = weight_bytes(CONFIG, 4), 4 * CONFIG.kv_bytes_per_token(4)
    check_memory(chosen, needs_of(0), 2 * size + 2)  # half of it is for weights and pool
    with pytest.raises(ConfigError, match=r"weights of .* take .* --mem-fraction-static leaves 0\.5 "):
        check_memory(chosen, needs_of(0), 2 * size)
    least = size + 2 * page
    check_memory(chosen, needs_of(2 * size), least + 2 * size)
    with pytest.raises(
        ConfigError, match=r"the weights .* GiB, the smallest KV pool .* and the engine .* GiB"
    ):
        check_memory(chosen, needs_of(2 * size), least + 2 * size - 1)
    fixed = CacheConfig(page_size=4, max_total_tokens=64, mem_fraction_static=0.1, dtype="float32")
    check_memory(settings(4, cache=fixed), needs_of(100), size + 17 * page + 100)
    with pytest.raises(ConfigError, match=r"KV pool of --max-total-tokens 64 .* lower --max-total-tokens, "):
        check_memory(settings(4, cache=fixed), needs_of(100), size + 17 * page + 99)


@pytest.mark.parametrize("flags", ["", "--max-running-requests 7 --context-length 33 --page-size 1"])
def test_tables_are_counted_exactly(flags: str) -> None:
    chosen = settle("qwen3-0.6b", flags)
    scheduler, meta = chosen.scheduler, torch.device("meta")
    rows, context = scheduler.max_running_requests + 1, scheduler.context_length
    device_rows = DeviceRows(rows, context, grant_ring(scheduler, chosen.cache.page_size), meta)
    sampling = SamplingRows(rows, chosen.model.vocab_size, context, meta)
    tables = [*vars(device_rows).values(), *vars(sampling).values()]
    whole = [t for t in tables if isinstance(t, torch.Tensor) and t._base is None]
    bias = rows * MAX_LOGIT_BIAS * 8  # an id and a value each, from the first request on that has so many
    assert sum(t.nbytes for t in whole) + bias == table_bytes(chosen)
    assert engine_needs(chosen).tables == table_bytes(chosen)


@pytest.mark.parametrize("change", [{}, {"graph": False}, {"rows": 300, "chunk": 4000}, {"rows": 1}])
def test_logits_are_counted_exactly(change: dict[str, Any]) -> None:
    chosen = cuda_cases.settings(cuda_cases.CONFIG, dtype="float32", **change)
    with stand_in(), torch.inference_mode():
        pool = KVPool(chosen.model, num_pages=2000, page_size=4, dtype=torch.float32, device=CPU)
        attn = create_attention("triton", chosen.model, CPU)
        made = CudaEngine(chosen, object(), pool, attn, CPU)
    assert made._logits.nbytes == engine_needs(chosen).logits


def held_at_most(step: Any) -> int:
    """Bytes that torch had taken on the CPU at one time while `step` ran."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
        step()
    held = most = 0
    events = [e for e in traced.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@pytest.mark.parametrize("wide", ["attention", "mlp", "neither"])
def test_a_step_holds_no_more_than_was_counted(wide: str) -> None:
    n, heads = 3000, {"attention": 16, "mlp": 4, "neither": 2}[wide]
    config = msgspec.structs.replace(
        CONFIG,
        num_q_heads=heads,
        num_kv_heads=heads // 2,
        intermediate_size=1024 if wide == "mlp" else 64,
        hidden_size=512 if wide == "neither" else 64,
    )
    decoder = Decoder(config, dtype=torch.float32, device=CPU, fused=True)
    decoder.load_weights(iter_dummy_weights(config, seed=0, dtype=torch.float32, device=CPU))
    pool = KVPool(config, num_pages=n, page_size=1, dtype=torch.float32, device=CPU)
    batch = ForwardBatch(
        input_ids=torch.zeros(n, dtype=torch.int64),
        positions=torch.arange(n) % config.max_position_embeddings,
        slot_mapping=torch.arange(n),
        req_to_token=torch.zeros(1, 1, dtype=torch.int32),
        logits_index=torch.arange(n),
        num_decode=0,
        decode=None,
        prefill=None,
    )
    with torch.inference_mode():
        most = held_at_most(lambda: decoder.forward(batch, pool, AttentionOutOfNothing()))
    counted = step_bytes(msgspec.structs.replace(settings(4), model=config), n)
    assert most <= counted <= 2 * most


class AttentionOutOfNothing:
    """Takes no memory but for its output."""

    def begin(self, batch: object, pool: object) -> None:
        return None

    def forward(self, layer: int, q: torch.Tensor, pool: object, state: object) -> torch.Tensor:
        return torch.zeros(q.shape)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3.2-1b"])
@pytest.mark.parametrize("card", CARDS)
def test_everything_fits_on_cards_of_all_sizes(card: int, name: str) -> None:
    chosen = settle(name)
    needs, free = engine_needs(chosen), int(CARDS[card] * GiB)
    check_memory(chosen, needs, free)
    now = free - weight_bytes(chosen.model, 2)
    size = size_pool(chosen, needs, available_at_start=free, available_now=now)
    pool, page = pool_bytes(chosen, size.num_pages), pool_bytes(chosen, 1)
    assert pool + needs.total <= now
    spare = now - pool - max(needs.total, int(0.12 * free))
    assert 0 <= spare <= 2 * page + 8  # the pool is as large as one of the two rules lets it be
    assert bool(size.note) == (needs.total > 0.12 * free)
    if size.note:
        assert "4096 rows" in size.note and f"{needs.total / GiB:.2f} GiB" in size.note
    # At most so much is bounds and estimates; the rest is tables and logits, to the byte.
    assert needs.total - needs.tables - needs.logits < 6.5 * GiB


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3.2-1b", "qwen3-0.6b"])
@pytest.mark.parametrize(("card", "rows"), [(24, 1024), (40, 2048), (80, 4096), (141, 4096)])
def test_a_small_card_has_fewer_rows_and_a_pool_worth_having(card: int, rows: int, name: str) -> None:
    free = int(CARDS[card] * GiB)
    chosen = settle(name, hardware=msgspec.structs.replace(GPU, gpu_bytes=card * 10**9))
    assert chosen.scheduler.max_running_requests == chosen.engine.cuda_graph_max_bs == rows
    line = next(line for line in chosen.choices if line.startswith("max_running_requests"))
    assert ("less than" in line) == (rows < 4096)
    needs, weights = engine_needs(chosen), weight_bytes(chosen.model, 2)
    check_memory(chosen, needs, free)
    size = size_pool(chosen, needs, available_at_start=free, available_now=free - weights)
    assert size.num_pages * 16 > 25_000
    asked = settle(name, "--max-running-requests 4096", msgspec.structs.replace(GPU, gpu_bytes=24 * 10**9))
    assert asked.scheduler.max_running_requests == 4096


@pytest.mark.parametrize("flags", ["", "--chunked-prefill-size -1", "--attention-backend flashinfer"])
@pytest.mark.parametrize(
    ("name", "tokens", "per_token"), [("llama-3-8b", 872_624, 131_072), ("qwen3-0.6b", 1_130_128, 114_688)]
)
def test_an_h200_keeps_the_pools_that_were_measured(
    name: str, tokens: int, per_token: int, flags: str
) -> None:
    chosen = settle(name, f"--context-length 4096 --max-running-requests 4096 {flags}")
    free = int(139.8 * GiB)
    # What was free after the weights, from the pool that the fraction alone made of it then.
    now = tokens * per_token + int(0.12 * free) + 2 * 16 * per_token - 1
    token = per_token + engine_needs(chosen).pool_token
    size = size_pool(chosen, engine_needs(chosen), available_at_start=free, available_now=now)
    assert size.note == ""
    assert (size.num_pages - 1) * 16 >= tokens * per_token // token - 16
    assert engine_needs(chosen).total < 10 * GiB < 0.12 * free


def test_what_flags_do_to_the_engines_needs() -> None:
    base = engine_needs(settle("llama-3.2-1b"))
    fewer = engine_needs(settle("llama-3.2-1b", "--max-running-requests 1024"))
    shorter = engine_needs(settle("llama-3.2-1b", "--context-length 8192"))
    whole = engine_needs(settle("llama-3.2-1b", "--chunked-prefill-size -1"))
    eager = engine_needs(settle("llama-3.2-1b", "--disable-cuda-graph"))
    assert fewer.tables < base.tables / 3.9 and fewer.logits < base.logits / 3.3
    assert shorter.tables < base.tables / 14
    assert base.step_tokens == 4096 + 8192 and whole.step_tokens == 4096 + 131071
    assert whole.steps > 10 * base.steps
    assert eager.graphs == 0 < base.graphs and eager.steps == base.steps
    flashinfer = engine_needs(settle("llama-3.2-1b", "--attention-backend flashinfer --context-length 2048"))
    triton = engine_needs(settle("llama-3.2-1b", "--context-length 2048"))
    assert flashinfer.steps - triton.steps == 51 * 2**20  # of 50 buckets, and one for all
    cpu = engine_needs(settle("llama-3.2-1b", hardware=Hardware(num_cpus=2, cpu_has_bf16=True)))
    assert cpu.graphs == 0 and cpu.num_rows == 256
    small = engine_needs(settle("llama-3.2-1b", "--chunked-prefill-size -1 --max-total-tokens 8192"))
    assert small.step_tokens == 4096 + 8192 < whole.step_tokens  # no prompt is longer than the pool
    few = engine_needs(settle("llama-3.2-1b", "--cuda-graph-max-bs 64"))
    naive = engine_needs(
        settle(
            "llama-3.2-1b", "--attention-backend flashinfer --kv-indices-backend naive --context-length 2048"
        )
    )
    assert few.graphs < base.graphs / 3
    assert naive.graphs < flashinfer.graphs and naive.logits < flashinfer.logits  # no mixed steps


@pytest.mark.parametrize(
    ("name", "flags", "gib"),
    [
        ("llama-3.2-1b", "", 16),
        ("llama-3.2-1b", "--max-total-tokens 2048", 8),
        ("qwen3-0.6b", "--max-total-tokens 2048", 5),
        ("qwen3-0.6b", "--chunked-prefill-size -1 --max-total-tokens 4096", 6),
    ],
)
def test_a_cpu_is_not_asked_for_what_only_the_largest_requests_take(name: str, flags: str, gib: int) -> None:
    cpu = Hardware(num_cpus=2, cpu_has_bf16=False)
    chosen = settle(name, flags, cpu)
    check_memory(chosen, engine_needs(chosen), gib * GiB)


@pytest.mark.parametrize(
    "change",
    [{}, {"rows": 7}, {"indices": "naive", "backend": "flashinfer"}, {"graph": False}, {"chunk": -1}],
)
@pytest.mark.parametrize("max_bs", [1, 5, 20])
def test_the_engine_captures_what_was_counted(max_bs: int, change: dict[str, Any]) -> None:
    chosen = cuda_cases.settings(cuda_cases.CONFIG, dtype="float32", **change)
    engine = msgspec.structs.replace(chosen.engine, cuda_graph_max_bs=max_bs)
    chosen = msgspec.structs.replace(chosen, engine=engine)
    with stand_in(), torch.inference_mode():
        pool = KVPool(chosen.model, num_pages=2000, page_size=4, dtype=torch.float32, device=CPU)
        made = CudaEngine(chosen, object(), pool, create_attention("triton", chosen.model, CPU), CPU)
    captured, mixed = captured_steps(chosen, 10**9)
    assert made._captured == captured and made._wanted_shapes == mixed.all()
    assert bool(captured) == (change != {"graph": False})
    assert bool(mixed.all()) == (bool(captured) and "indices" not in change)
    assert not captured or captured[-1] == min(
        b for b in made._buckets if b >= min(max_bs, made._buckets[-1])
    )


def test_the_log_says_what_the_engine_keeps_where_that_bounds_the_pool(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CacheConfig(page_size=4, max_total_tokens=None, mem_fraction_static=0.999, dtype="float32")
    chosen = settings(4, cache=cache)
    needs, page = engine_needs(chosen), 4 * CONFIG.kv_bytes_per_token(4)
    left = iter([needs.total + 9 * page + weight_bytes(CONFIG, 4), needs.total + 9 * page])
    monkeypatch.setattr(build, "available_bytes", lambda device: next(left))
    caplog.set_level("INFO", "phalanx")
    worker, info = build_worker(chosen, progress=False)
    worker._engine.close()
    assert info["num_pages"] == 9
    (line,) = [text for text in caplog.messages if text.startswith("KV pool: ")]
    assert f"; the engine keeps {needs}, more than --mem-fraction-static leaves; start-up " in line


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3.2-1b"])
def test_a_card_of_24_gb_holds_what_was_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    start, total = torch.cuda.mem_get_info(device)
    limit = min(int(23.5 * GiB), start)
    monkeypatch.setattr(build, "available_bytes", lambda device: limit - (start - available_bytes(device)))
    torch.cuda.set_per_process_memory_fraction(limit / total, device)
    try:
        built = build.build_engine(settle(name), progress=False)
        taken = start - available_bytes(device)
        built.engine.close()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert built.pool.note and taken <= limit
