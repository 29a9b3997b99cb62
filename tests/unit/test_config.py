"""The command line and what `resolve` makes of it."""

from __future__ import annotations

import msgspec
import pytest

from phalanx.config.cli import build_parser
from phalanx.config.groups import ModelConfig, ModelSource, RopeConfig, Settings
from phalanx.config.hardware import Hardware, detect
from phalanx.config.resolve import resolve
from phalanx.core.errors import ConfigError

HARDWARE = Hardware(num_cpus=2, cpu_has_bf16=True)
SOURCE = ModelSource(name="m", load_format="gguf", path="m.gguf", tokenizer_path="m.gguf")
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
SEED_FLAGS = (
    "--trust-remote-code --disable-cuda-graph --model smollm2 --context-length 4096 "
    "--max-running-requests 4096 --tensor-parallel-size 1 --chunked-prefill-size -1 --disable-radix-cache"
)


def settle(flags: str, model: ModelConfig = MODEL, hardware: Hardware = HARDWARE) -> Settings:
    return resolve(build_parser().parse_args(flags.split()), hardware, SOURCE, model)


def test_the_seeds_command_line() -> None:
    settings = settle(SEED_FLAGS)
    assert settings.scheduler.context_length == 4096
    assert settings.scheduler.max_running_requests == 4096
    assert settings.scheduler.chunked_prefill_size == -1
    assert settings.server.port == 30000
    assert settings.server.host == "127.0.0.1"
    log = "\n".join(settings.choices)
    for flag in ("--disable-cuda-graph", "--disable-radix-cache", "--trust-remote-code"):
        assert flag in log  # accepted, and said so


def test_auto_choices_are_explained() -> None:
    settings = settle("--model m")
    log = "\n".join(settings.choices)
    for name in ("device", "dtype", "context_length", "page_size", "max_running_requests", "random_seed"):
        assert f"{name} = " in log
    assert settings.engine.dtype == "bfloat16"
    assert settings.scheduler.context_length == 8192


def test_dtype_follows_the_cpu() -> None:
    slow = Hardware(num_cpus=2, cpu_has_bf16=False)
    assert settle("--model m", hardware=slow).engine.dtype == "float32"
    assert settle("--model m --dtype bfloat16", hardware=slow).engine.dtype == "bfloat16"
    assert settle("--model m --dtype float").engine.dtype == "float32"


GPU = Hardware(
    num_cpus=2, cpu_has_bf16=True, gpu_name="GPU", gpu_bytes=2**37, has_triton=True, has_flashinfer=True
)


def test_a_gpu_is_used_where_there_is_one() -> None:
    settings = settle("--model m", hardware=GPU)
    engine, log = settings.engine, "\n".join(settings.choices)
    assert (engine.device, engine.dtype, engine.attention_backend) == ("cuda", "bfloat16", "triton")
    assert engine.cuda_graph and engine.cuda_graph_max_bs == 4096 == settings.scheduler.max_running_requests
    for name in ("device", "dtype", "attention_backend", "cuda_graph_max_bs"):
        assert f"{name} = " in log
    assert settle("--model m --device cpu", hardware=GPU).engine.device == "cpu"
    half = msgspec.structs.replace(MODEL, dtype="float16")
    assert settle("--model m", half, GPU).engine.dtype == "float16"


def test_cuda_graphs_follow_the_rows() -> None:
    def engine(flags: str):
        return settle(f"--model m {flags}", hardware=GPU).engine

    assert engine("--max-running-requests 8500").cuda_graph_max_bs == 8192
    assert engine("--max-running-requests 16 --cuda-graph-max-bs 64").cuda_graph_max_bs == 16  # B06
    assert engine("--cuda-graph-max-bs 100").cuda_graph_max_bs == 100
    log = settle("--model m --cuda-graph-max-bs 100", hardware=GPU).choices  # B29
    assert sum("run eagerly" in line for line in log) == 1
    assert not any("run eagerly" in line for line in settle("--model m", hardware=GPU).choices)
    for flags in ("--disable-cuda-graph", "--attention-backend torch_native"):
        assert not engine(flags).cuda_graph and engine(flags).cuda_graph_max_bs == 0


def test_attention_backends_on_a_gpu() -> None:
    wide = msgspec.structs.replace(MODEL, head_dim=128)
    assert (
        settle("--model m --attention-backend flashinfer", wide, GPU).engine.attention_backend == "flashinfer"
    )
    bare = msgspec.structs.replace(GPU, has_flashinfer=False)
    for flags, model, hardware, word in (
        ("flashinfer", wide, bare, "flashinfer-python"),
        ("flashinfer", msgspec.structs.replace(MODEL, head_dim=80), GPU, "head_dim of 80"),  # B63
        ("flashinfer --dtype float32", wide, GPU, "float32"),
        ("triton", wide, msgspec.structs.replace(GPU, has_triton=False), "Triton"),
        ("auto --disable-cuda-graph --cuda-graph-max-bs 8", wide, GPU, "--cuda-graph-max-bs 8"),
        ("auto --cuda-graph-max-bs 8193 --max-running-requests 8500", wide, GPU, "8193"),
        ("auto --cuda-graph-max-bs 0", wide, GPU, "--cuda-graph-max-bs"),
        ("triton --kv-indices-backend naive", wide, GPU, "--kv-indices-backend naive"),
    ):
        with pytest.raises(ConfigError, match=word):
            settle(f"--model m --attention-backend {flags}", model, hardware)


def lines_of(flags: str, name: str, hardware: Hardware = GPU) -> list[str]:
    found = settle(f"--model m {flags}", msgspec.structs.replace(MODEL, head_dim=128), hardware)
    return [line for line in found.choices if name in line]


@pytest.mark.parametrize("backend", ["naive", "torch", "triton", "fused"])
def test_the_backend_that_builds_kv_indices_is_always_said(backend: str) -> None:
    asked = f"--attention-backend flashinfer --kv-indices-backend {backend}"
    chosen = settle(f"--model m {asked}", msgspec.structs.replace(MODEL, head_dim=128), GPU)
    assert chosen.engine.kv_indices_backend == backend
    assert lines_of(asked, "kv_indices") == [f"kv_indices_backend = {backend} (as asked)"]
    assert lines_of("--attention-backend flashinfer", "kv_indices") == [
        "kv_indices_backend = fused (one launch with the rest of a step's preparation)"
    ]


def test_attention_without_kv_indices_says_nothing_of_them() -> None:
    for flags, hardware in (("", GPU), ("--attention-backend triton", GPU), ("", HARDWARE)):
        assert settle(f"--model m {flags}", hardware=hardware).engine.kv_indices_backend is None
        assert lines_of(flags, "kv_indices", hardware) == []


@pytest.mark.parametrize("backend", ["triton", "flashinfer", "torch_native"])
def test_what_was_asked_for_is_said_too(backend: str) -> None:
    assert lines_of(f"--attention-backend {backend}", "attention_backend") == [
        f"attention_backend = {backend} (as asked)"
    ]
    assert len(lines_of("", "attention_backend")) == 1
    assert lines_of("--disable-cuda-graph", "CUDA graph") == [
        "no CUDA graphs (--disable-cuda-graph): steps run eagerly, which costs the host more"
    ]
    graphs = "--max-running-requests 64 --cuda-graph-max-bs"
    assert lines_of(f"{graphs} 64", "cuda_graph_max_bs") == ["cuda_graph_max_bs = 64 (as asked)"]
    assert len(lines_of(f"{graphs} 63", "cuda_graph_max_bs")) == 1


def test_a_memory_fraction_beside_a_fixed_pool_is_said_to_be_unused() -> None:
    (line,) = lines_of("--mem-fraction-static 0.7 --max-total-tokens 4096", "mem-fraction-static")
    assert line.startswith("--max-total-tokens 4096 sets") and line.endswith("0.7 is not used")
    for alone in ("--mem-fraction-static 0.7", "--max-total-tokens 4096", ""):
        assert lines_of(alone, "mem-fraction-static") == []


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--tensor-parallel-size 2", "--tensor-parallel-size 2"),
        ("--tp 4", "--tensor-parallel-size 4"),
        ("--dp-size 2", "--data-parallel-size 2"),
        ("--quantization fp8", "--quantization fp8"),
        ("--kv-cache-dtype fp8_e5m2", "--kv-cache-dtype"),
        ("--schedule-policy lpm", "--schedule-policy lpm"),
        ("--device cuda", "--device cuda"),
        ("--dtype float16", "--dtype float16"),
        ("--attention-backend flashinfer", "--attention-backend flashinfer"),
        ("--attention-backend triton", "--attention-backend triton"),
        ("--cuda-graph-max-bs 8", "--cuda-graph-max-bs 8"),
        ("--context-length 10000", "8192"),
        ("--context-length 1", "--context-length"),
        ("--chunked-prefill-size 0", "--chunked-prefill-size"),
        ("--page-size 3", "--page-size"),
        ("--max-running-requests 0", "--max-running-requests"),
        ("--max-total-tokens 0", "--max-total-tokens"),
        ("--mem-fraction-static 1.5", "--mem-fraction-static"),
        ("--port 70000", "--port"),
        ("--random-seed -1", "--random-seed"),
        ("--num-threads 0", "--num-threads"),
        ("--null-step-ms 5", "--device null"),
        ("--device null --null-step-ms 0", "--null-step-ms"),
        ("--device null --mem-fraction-static 0.3", "--mem-fraction-static"),
        ("--device null --null-step-ms inf", "--null-step-ms"),
        ("--device null --null-step-ms 1e308", "--null-step-ms"),
        ("--device null --max-total-tokens 100000000000", "--max-total-tokens 100000000000"),
        ("--max-running-requests 1000000000 --context-length 4", "--max-running-requests"),
        ("--max-running-requests 1048577 --context-length 4", "at most 1048576"),
        ("--watchdog-timeout 1e10", "--watchdog-timeout"),
        ("--shutdown-timeout inf", "--shutdown-timeout"),
        ("--request-timeout 1e300", "--request-timeout"),
        ("--served-model-name \udcff", "--served-model-name"),
        ("--api-key \udcff", "--api-key"),
        ("--model \udcff", "--model"),
        ("--stream-interval 0", "--stream-interval"),
        ("--skip-tokenizer-init --chat-template {{messages}}", "--chat-template"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(flags: str, word: str) -> None:
    with pytest.raises(ConfigError) as error:
        settle(f"--model m {flags}")
    assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["", " abc", "abc\n", "abc\t", "a\x00c", "a\nb", "\udcff", "\x7f"])
@pytest.mark.parametrize("origin", ["--api-key", "PHALANX_API_KEY"])
def test_a_key_that_no_client_can_send_is_refused_by_where_it_came_from(key: str, origin: str) -> None:
    args = build_parser().parse_args(["--model", "m", f"--api-key={key}"])
    args.api_key_origin = origin
    with pytest.raises(ConfigError) as error:
        resolve(args, HARDWARE, SOURCE, MODEL)
    assert str(error.value).startswith(origin) and "abc" not in str(error.value)


def test_keys_that_can_be_sent() -> None:
    for key in ("abc", "a b", "sk-\u00e4"):
        args = build_parser().parse_args(["--model", "m", "--api-key", key])
        assert resolve(args, HARDWARE, SOURCE, MODEL).server.api_key == key


def test_a_path_that_is_no_text_is_refused() -> None:
    source = msgspec.structs.replace(SOURCE, path="/models/\udcff")
    with pytest.raises(ConfigError, match="the model's path"):
        resolve(build_parser().parse_args(["--model", "m"]), HARDWARE, source, MODEL)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--log-requests-level 3", "--log-requests-level 3: not used without --log-requests"),
        ("--log-requests-format text", "--log-requests-format text: not used without --log-requests"),
        (
            "--skip-tokenizer-init --tokenizer-path t",
            "--tokenizer-path t: not used with --skip",
        ),
        ("--device null --num-threads 4", "--num-threads 4: not used on null, which runs no model"),
        ("--device null --dtype float32", "--dtype float32: not used on null, which runs no model"),
        (
            "--device null --attention-backend torch_native",
            "--attention-backend torch_native: not used",
        ),
        ("--device cpu --chunked-prefill-size -1", "chunked_prefill_size = -1 (off): a step may take 16384"),
    ],
)
def test_what_has_no_effect_or_a_price_is_said(flags: str, line: str) -> None:
    assert sum(choice.startswith(line) for choice in settle(f"--model m {flags}").choices) == 1


def test_nothing_is_said_of_what_has_its_effect() -> None:
    for flags in (
        "--log-requests --log-requests-level 3 --log-requests-format json --tokenizer-path t",
        "--num-threads 4 --dtype float32 --chunked-prefill-size 64",
        "--device null",
    ):
        log = "\n".join(settle(f"--model m {flags}").choices)
        assert "not used" not in log and "(off)" not in log
    server = settle("--model m --log-requests --log-requests-level 3 --log-requests-format json").server
    assert (server.log_requests_level, server.log_requests_format) == (3, "json")
    assert settle("--model m --log-requests").server.log_requests_level == 2
    assert settle("--model m --log-requests-level 3").server.log_requests_level is None


def test_the_log_says_how_weights_are_stored() -> None:
    packed = msgspec.structs.replace(MODEL, quantization="Q4_1")
    for hardware in (HARDWARE, GPU):
        (line,) = (c for c in settle("--model m", packed, hardware).choices if c.startswith("dtype = "))
        assert line.endswith("Q4_1 blocks are dequantised)")
        assert "the checkpoint says bfloat16" in "".join(settle("--model m", hardware=hardware).choices)


def test_table_too_large_is_refused() -> None:
    model = msgspec.structs.replace(MODEL, max_position_embeddings=131072)
    with pytest.raises(ConfigError, match="GiB"):
        settle("--model m --max-running-requests 65536 --context-length 131072", model)
    model = msgspec.structs.replace(MODEL, max_position_embeddings=10**400)
    with pytest.raises(ConfigError, match="GiB"):
        settle("--model m", model)


def test_sliding_window_limits_the_context() -> None:
    model = msgspec.structs.replace(MODEL, sliding_window=4096)
    assert settle("--model m", model).scheduler.context_length == 4096
    with pytest.raises(ConfigError, match="sliding window of 4096"):
        settle("--model m --context-length 4097", model)


def test_unknown_flags_and_abbreviations_are_refused() -> None:
    for flags in ("--model m --no-such-flag", "--model m --max-running 3"):
        with pytest.raises(SystemExit) as error:
            build_parser().parse_args(flags.split())
        assert error.value.code == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--modl m", "--modl; did you mean --model?"),
        ("--model m --max-runing-requests=4", "--max-runing-requests; did you mean --max-running-requests?"),
        ("--no-such-flag 3", "unrecognized arguments: --no-such-flag (see"),
    ],
)
def test_a_mistyped_flag_is_named_with_the_one_that_was_meant(
    flags: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(flags.split())
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_what_looks_like_a_flag_but_is_a_value() -> None:
    args = build_parser().parse_args(["--model=--m", "--chat-template=--no-such-flag"])
    assert (args.model, args.chat_template) == ("--m", "--no-such-flag")


def test_null_device_and_streaming_flags() -> None:
    settings = settle("--model m --device null --null-step-ms 2.5 --stream-interval 8")
    assert (settings.engine.device, settings.engine.null_step_ms) == ("null", 2.5)
    assert settings.server.stream_interval == 8
    assert settle("--model m --device null").engine.null_step_ms is None
    assert settle("--model m").server.stream_interval == 1


def test_settings_survive_json() -> None:
    settings = settle(SEED_FLAGS)
    assert msgspec.json.decode(msgspec.json.encode(settings), type=Settings) == settings


def test_detect_sees_this_machine() -> None:
    hardware = detect()
    assert hardware.num_cpus >= 1
    assert (hardware.gpu_name is None) == (hardware.gpu_bytes == 0)


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 1), (7, 1), (8, 2), (12, 3), (16, 4), (192, 4)])
def test_api_workers_go_by_the_cores(cores: int, workers: int) -> None:
    settings = settle("--model m", hardware=msgspec.structs.replace(HARDWARE, num_cpus=cores))
    assert settings.server.api_workers == workers
    assert f"api_workers = {workers} ({cores} cores" in "\n".join(settings.choices)


@pytest.mark.parametrize("flag", ["--api-workers", "--tokenizer-worker-num"])
def test_api_workers_as_asked(flag: str) -> None:
    settings = settle(f"--model m {flag} 3")
    assert settings.server.api_workers == 3
    assert "api_workers" not in "\n".join(settings.choices)
    for count in (0, -1, 65):
        with pytest.raises(ConfigError, match="--api-workers"):
            settle(f"--model m {flag} {count}")


def test_timeouts() -> None:
    server = settle("--model m --shutdown-timeout 0 --watchdog-timeout 0").server
    assert (server.shutdown_timeout_s, server.watchdog_timeout_s) == (0, 0)
    server = settle("--model m --shutdown-timeout 2.5 --watchdog-timeout 60").server
    assert (server.shutdown_timeout_s, server.watchdog_timeout_s) == (2.5, 60)
    for flags in ("--shutdown-timeout -1", "--shutdown-timeout nan", "--watchdog-timeout 0.5"):
        with pytest.raises(ConfigError, match=flags.split()[0]):
            settle(f"--model m {flags}")
