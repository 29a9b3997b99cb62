"""The engine's part of `resolve`: device, dtype, attention backend, CUDA graphs."""

from __future__ import annotations

import argparse
import secrets

import msgspec

from phalanx.config.groups import EngineConfig, ModelConfig, SchedulerConfig
from phalanx.config.hardware import Hardware
from phalanx.core.errors import ConfigError

_DTYPE_ALIASES = {"half": "float16", "float": "float32"}
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_MAX_GRAPH_ROWS = 8192
_MAX_THREADS = 1024  # OpenMP ends the process where the system gives it fewer than it asks for
_MAX_NULL_STEP_MS = 86400e3  # a day: sleeps do not take every number
_FLASHINFER_HEAD_DIMS = (64, 128, 256)


class Log:
    """Collects one line per choice."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        """Note a choice and its reason."""
        self.lines.append(line)


def settle_engine(args: argparse.Namespace, hardware: Hardware, model: ModelConfig, log: Log) -> EngineConfig:
    """All but the graphs, which `settle_graphs` decides once the rows are known. Raises ConfigError."""
    device = _device(args, hardware, log)
    dtype = _dtype(args, device, hardware, model, log)
    backend = _attention_backend(args, device, dtype, hardware, model, log)
    if args.num_threads is not None and not 1 <= args.num_threads <= _MAX_THREADS:
        raise ConfigError(f"--num-threads must be in [1, {_MAX_THREADS}], got {args.num_threads}")
    if device == "null":
        _say_what_null_ignores(args, log)
    threads = args.num_threads or hardware.num_cpus
    seed = args.random_seed
    if seed is not None and not 0 <= seed < 2**63:
        raise ConfigError(f"--random-seed must be in [0, 2**63), got {seed}")
    if seed is None:
        seed = secrets.randbits(31)
        log(f"random_seed = {seed} (drawn; --random-seed repeats the seeds of requests that bring none)")
    return EngineConfig(
        device=device,
        dtype=dtype,
        attention_backend=backend,
        kv_indices_backend=_kv_indices_backend(args, backend, log),
        overlap=not args.disable_overlap_schedule,
        cuda_graph=False,
        random_seed=seed,
        num_threads=threads,
        null_step_ms=_null_step_ms(args, device),
    )


def _device(args: argparse.Namespace, hardware: Hardware, log: Log) -> str:
    device = str(args.device)
    if device == "auto":
        device = "cuda" if hardware.gpu_name else "cpu"
        log(f"device = {device} ({hardware.gpu_name or 'no GPU found'})")
    if device == "cuda" and hardware.gpu_name is None:
        raise ConfigError("--device cuda is not possible: no GPU was found")
    return device


def _say_what_null_ignores(args: argparse.Namespace, log: Log) -> None:
    for flag, value, default in (
        ("--num-threads", args.num_threads, None),
        ("--dtype", args.dtype, "auto"),
        ("--attention-backend", args.attention_backend, "auto"),
    ):
        if value != default:
            log(f"{flag} {value}: not used on null, which runs no model")


def _null_step_ms(args: argparse.Namespace, device: str) -> float | None:
    step_ms: float | None = args.null_step_ms
    if step_ms is not None and device != "null":
        raise ConfigError(f"--null-step-ms goes with --device null, not {device}")
    if step_ms is not None and not 0 < step_ms <= _MAX_NULL_STEP_MS:
        raise ConfigError(
            f"--null-step-ms must be above 0 and at most {_MAX_NULL_STEP_MS:.0f}, got {step_ms:g}"
        )
    return step_ms


def _dtype(args: argparse.Namespace, device: str, hardware: Hardware, model: ModelConfig, log: Log) -> str:
    dtype = _DTYPE_ALIASES.get(args.dtype, args.dtype)
    stored = f"the checkpoint says {model.dtype}"
    if model.quantization is not None:
        stored = f"{model.quantization} blocks are dequantised"
    if dtype == "auto" and device == "cuda":
        dtype = "float16" if model.dtype == "float16" else "bfloat16"
        log(f"dtype = {dtype} ({stored})")
    elif dtype == "auto":
        dtype = "bfloat16" if hardware.cpu_has_bf16 else "float32"
        why = "this CPU multiplies bfloat16" if hardware.cpu_has_bf16 else "this CPU has no bfloat16 units"
        log(f"dtype = {dtype} ({why}; {stored})")
    if dtype == "float16" and device != "cuda":
        raise ConfigError("--dtype float16 is not possible on cpu: bfloat16 or float32")
    return str(dtype)


def _attention_backend(
    args: argparse.Namespace, device: str, dtype: str, hardware: Hardware, model: ModelConfig, log: Log
) -> str:
    backend = str(args.attention_backend)
    if backend == "auto":
        if device == "cpu" and hardware.has_numba:
            backend, why = "numba", "compiled for this CPU, reads the request table itself"
        elif device == "cpu":
            backend, why = "torch_native", "numba is not installed; decode attention takes twice as long"
        elif device != "cuda":
            backend, why = "torch_native", f"the backend for {device}"
        elif hardware.has_triton:
            backend, why = "triton", "faster than FlashInfer at all batch sizes that were measured"
        else:
            backend, why = "torch_native", "Triton is not installed; much slower on a GPU"
    else:
        why = "as asked"
    log(f"attention_backend = {backend} ({why})")
    if backend == "torch_native":
        return backend
    refused = f"--attention-backend {backend} is not possible"
    if backend == "numba":
        if device != "cpu":
            raise ConfigError(f"{refused} on {device}: it is for the CPU")
        if not hardware.has_numba:
            raise ConfigError(f"{refused}: numba is not installed")
        return backend
    if device != "cuda":
        raise ConfigError(f"{refused} on {device}: only {'numba or ' if device == 'cpu' else ''}torch_native")
    if not hardware.has_triton:
        raise ConfigError(f"{refused}: Triton is not installed")
    if backend == "flashinfer":
        if not hardware.has_flashinfer:
            raise ConfigError(f"{refused}: the package flashinfer-python is not installed")
        if dtype == "float32":
            raise ConfigError(f"{refused} with float32: bfloat16 or float16")
        if model.head_dim not in _FLASHINFER_HEAD_DIMS:
            raise ConfigError(
                f"{refused} with a head_dim of {model.head_dim}: "
                f"{', '.join(map(str, _FLASHINFER_HEAD_DIMS))} are"
            )
    return backend


def _kv_indices_backend(args: argparse.Namespace, attention: str, log: Log) -> str | None:
    wanted: str | None = args.kv_indices_backend
    if attention != "flashinfer":
        if wanted is not None:
            raise ConfigError(
                f"--kv-indices-backend {wanted} goes with --attention-backend flashinfer: "
                f"{attention} reads the request table itself"
            )
        return None
    why = "as asked"
    if wanted is None:
        wanted, why = "fused", "one launch with the rest of a step's preparation"
    log(f"kv_indices_backend = {wanted} ({why})")
    return wanted


def settle_graphs(
    args: argparse.Namespace, engine: EngineConfig, scheduler: SchedulerConfig, log: Log
) -> EngineConfig:
    """The engine's settings with graphs settled."""
    wanted, running = args.cuda_graph_max_bs, scheduler.max_running_requests
    if wanted is not None and wanted < 1:
        raise ConfigError(f"--cuda-graph-max-bs must be at least 1, got {wanted}")
    if engine.device != "cuda" or args.disable_cuda_graph or engine.attention_backend == "torch_native":
        if wanted is not None:
            why = "--disable-cuda-graph" if args.disable_cuda_graph else engine.attention_backend
            where = f"with {why}" if engine.device == "cuda" else f"on {engine.device}"
            raise ConfigError(
                f"--cuda-graph-max-bs {wanted} is not possible: there are no CUDA graphs {where}"
            )
        if engine.device != "cuda" and args.disable_cuda_graph:
            log(f"--disable-cuda-graph: so already on {engine.device}")
        elif args.disable_cuda_graph:
            log("no CUDA graphs (--disable-cuda-graph): steps run eagerly, which costs the host more")
        elif engine.device == "cuda":
            log(f"no CUDA graphs: {engine.attention_backend} reads lengths on the host, so steps run eagerly")
        return engine
    if wanted is None:
        wanted = min(running, _MAX_GRAPH_ROWS)
        log(f"cuda_graph_max_bs = {wanted} (max_running_requests, at most {_MAX_GRAPH_ROWS})")
    if wanted > _MAX_GRAPH_ROWS:
        raise ConfigError(f"--cuda-graph-max-bs must be at most {_MAX_GRAPH_ROWS}, got {wanted}")
    if wanted > running:
        log(f"cuda_graph_max_bs = {running} (no step has more rows than max_running_requests)")
        wanted = running
    elif args.cuda_graph_max_bs == running:
        log(f"cuda_graph_max_bs = {running} (as asked)")
    if wanted < running:
        log(f"cuda_graph_max_bs = {wanted}: steps of more rows run eagerly, which costs the host more")
    return msgspec.structs.replace(engine, cuda_graph=True, cuda_graph_max_bs=wanted)
