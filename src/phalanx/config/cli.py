"""The server's command line: SGLang's flag names, one table of what each means here.

A flag that asks for what is so already is accepted and logged; one that asks for what cannot be done is
refused by `resolve` with a ConfigError. A flag that is not listed at all is refused by argparse.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import NoReturn

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DTYPES = ("auto", "bfloat16", "float16", "float32", "half", "float")
ATTENTION_BACKENDS = ("auto", "flashinfer", "triton", "numba", "torch_native")
KV_INDICES_BACKENDS = ("naive", "torch", "triton", "fused")
_NEAR = 0.8  # of difflib's ratio: a letter or two
LOG_LEVELS = ("debug", "info", "warning", "error")


class OneLineParser(argparse.ArgumentParser):
    """Refuses a bad command line in one line, with exit code 2, and shows defaults in its help."""

    def __init__(self, prog: str, description: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=_HelpFormatter,
        )

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """As argparse's, but a flag that does not exist is named before one that is missing."""
        argv = sys.argv[1:] if args is None else list(args)
        known = self._option_string_actions
        for word in argv[: argv.index("--")] if "--" in argv else argv:
            name = word.partition("=")[0]
            if name.startswith("--") and " " not in name and name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)
                hint = f"; did you mean {near[0]}?" if near else ""
                self.error(f"unrecognized arguments: {name}{hint}")
        return super().parse_args(argv, namespace)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit."""
        print(f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the description's lines, and adds each default that says something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, True, []):
            return action.help
        return super()._get_help_string(action)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that say which model to load and how to run it: shared by serve, generate and bench offline."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model-path",
        "--model",
        dest="model",
        required=True,
        metavar="MODEL",
        help="smollm2, a folder, a .gguf file, a hub id, or with --load-format dummy a built-in shape: "
        "llama-3-8b, llama-3.2-1b, qwen3-0.6b, tiny-llama",
    )
    group.add_argument(
        "--tokenizer-path", metavar="PATH", help="where the tokenizer lies, if not with the model"
    )
    group.add_argument(
        "--load-format",
        choices=LOAD_FORMATS,
        default="auto",
        help="how the weights are stored; dummy draws random ones",
    )
    group.add_argument("--revision", help="hub revision (branch, tag or commit)")
    group.add_argument(
        "--chat-template", metavar="FILE", help="a Jinja file that replaces the model's chat template"
    )
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="of weights and activations")
    group.add_argument("--context-length", type=int, help="prompt plus output of one request, in tokens")
    group.add_argument(
        "--trust-remote-code", action="store_true", help="accepted: no code of a checkpoint is ever run"
    )
    group.add_argument("--quantization", help="refused unless none: quantised compute is not built yet")
    group.add_argument("--kv-cache-dtype", default="auto", help="auto: the compute dtype; others are refused")

    group = parser.add_argument_group("engine")
    group.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda", "null"),
        default="auto",
        help="null emits tokens without a model",
    )
    group.add_argument(
        "--null-step-ms", type=float, help="length of a step of --device null (default: as fast as can be)"
    )
    group.add_argument("--random-seed", type=int, help="seed of requests that bring none (default: drawn)")
    group.add_argument(
        "--attention-backend", choices=ATTENTION_BACKENDS, default="auto", help="auto goes by the device"
    )
    group.add_argument(
        "--kv-indices-backend",
        choices=KV_INDICES_BACKENDS,
        help="who builds the page lists of --attention-backend flashinfer each step (default: fused)",
    )
    group.add_argument(
        "--cuda-graph-max-bs",
        type=int,
        help="decode steps of up to this many rows replay a CUDA graph (default: max running, at most 8192)",
    )
    group.add_argument(
        "--disable-cuda-graph", action="store_true", help="run steps eagerly (always so on a CPU)"
    )
    group.add_argument(
        "--disable-overlap-schedule", action="store_true", help="read each step before launching the next"
    )
    group.add_argument("--num-threads", type=int, help="CPU threads of the engine (default: the cores)")

    group = parser.add_argument_group("memory and scheduling")
    group.add_argument("--page-size", type=int, help="tokens per KV page: 1 or 16 are the tested sizes")
    group.add_argument("--max-total-tokens", type=int, help="size of the KV pool in tokens")
    group.add_argument(
        "--mem-fraction-static", type=float, help="share of memory for weights and KV pool together"
    )
    group.add_argument("--max-running-requests", type=int, help="requests that decode at once")
    group.add_argument(
        "--max-queued-requests", type=int, help="waiting requests beyond which new ones get a 503"
    )
    group.add_argument("--max-prefill-tokens", type=int, default=16384, help="prompt tokens in one step")
    group.add_argument(
        "--chunked-prefill-size",
        type=int,
        help="split prompts into chunks of this many tokens; -1 never splits",
    )
    group.add_argument("--schedule-policy", default="fcfs", help="fcfs")
    group.add_argument(
        "--disable-radix-cache", action="store_true", help="accepted: there is no prefix cache yet"
    )
    group.add_argument("--enable-mixed-chunk", action="store_true", help="accepted: steps are always mixed")

    group = parser.add_argument_group("parallelism")
    group.add_argument("--tensor-parallel-size", "--tp-size", "--tp", dest="tp_size", type=int, default=1)
    group.add_argument("--data-parallel-size", "--dp-size", "--dp", dest="dp_size", type=int, default=1)
    group.add_argument("--pipeline-parallel-size", "--pp-size", dest="pp_size", type=int, default=1)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the HTTP side."""
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on")
    group.add_argument("--port", type=int, default=30000, help="port to listen on; 0 takes a free one")
    group.add_argument(
        "--api-key",
        help="demanded as a bearer token on every route but /health, /ready, /ping and the page at /; "
        "$PHALANX_API_KEY keeps it out of ps",
    )
    parser.set_defaults(api_key_origin="--api-key")
    group.add_argument(
        "--cors-allow-origins",
        default="*",
        metavar="ORIGINS",
        help="web pages of these origins, separated by commas, may use the server; * allows all of them",
    )
    group.add_argument(
        "--request-timeout",
        type=float,
        metavar="SECONDS",
        help="a request that is not answered in full by then is ended with an error (default: never)",
    )
    group.add_argument(
        "--enable-cache-report",
        action="store_true",
        help="OpenAI's usage says how many prompt tokens were found in a cache",
    )
    group.add_argument("--enable-metrics", action="store_true", help="accepted: /metrics is always there")
    group.add_argument(
        "--log-requests", action="store_true", help="log every request; without it no prompt is ever logged"
    )
    group.add_argument(
        "--log-requests-level",
        type=int,
        choices=(0, 1, 2, 3),
        help="0: counts and times; 1: parameters too; 2 (default): the beginning of prompt and output too; "
        "3: all",
    )
    group.add_argument(
        "--log-requests-format", choices=("text", "json"), help="of a line of the request log (default: text)"
    )
    group.add_argument("--served-model-name", help="the name clients use (default: the model as typed)")
    group.add_argument(
        "--skip-tokenizer-init", action="store_true", help="ids in, ids out: no tokenizer is loaded"
    )
    group.add_argument(
        "--incremental-streaming-output", action="store_true", help="/generate streams deltas, not the whole"
    )
    group.add_argument(
        "--stream-interval",
        type=int,
        default=1,
        metavar="K",
        help="streamed events carry K tokens or more, the first and the last of a stream excepted",
    )
    group.add_argument(
        "--api-workers",
        "--tokenizer-worker-num",
        dest="api_workers",
        type=int,
        metavar="N",
        help="processes that share the port (default: one for every 4 cores, 1 to 4)",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="after SIGTERM, how long running requests may go on before they end with an error",
    )
    group.add_argument(
        "--watchdog-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="a step of the engine that lasts longer ends the server; 0 waits for ever",
    )
    group.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="of the server's own log")


def build_parser(prog: str = "phalanx serve") -> argparse.ArgumentParser:
    """The whole command line of the server."""
    parser = OneLineParser(prog, "Serve a model over HTTP (SGLang's and OpenAI's routes).")
    add_model_arguments(parser)
    add_server_arguments(parser)
    return parser
