"""`LLM`: the engine in this process, without a server."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from phalanx.config.cli import add_model_arguments
from phalanx.core.errors import ConfigError, EngineError, RequestError
from phalanx.core.request import EngineRequest, LogprobParams
from phalanx.core.sampling_params import SamplingParams, plain
from phalanx.core.settle import Settler, end_tokens
from phalanx.runtime.build import build_worker
from phalanx.runtime.interrupts import held_interrupts
from phalanx.runtime.models import settle_settings
from phalanx.runtime.outputs import Collector, RequestOutput
from phalanx.runtime.process import tame_libraries
from phalanx.text.detokenizer import Detokenizer
from phalanx.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]


def _arguments(model: str, options: dict[str, Any]) -> argparse.Namespace:
    """The command line's defaults with `options` laid over them.

    Raises TypeError for unknown names, ConfigError for what the flag would not take.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_model_arguments(parser)
    args = parser.parse_args([f"--model={model}"])
    flags = {flag.dest: flag for flag in parser._actions if hasattr(args, flag.dest)}
    for name, value in options.items():
        if name not in flags:
            raise TypeError(f"LLM() got an unexpected option {name!r}")
        setattr(args, name, _checked(flags[name], value))
    return args


def _checked(flag: argparse.Action, value: Any) -> Any:
    """An option's value as its flag would give it; None stands for the default where that is None."""
    if value is None and flag.default is None:
        return None
    value = plain(value)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    kinds: tuple[type, ...] = {int: (int,), float: (int, float)}.get(flag.type, (str,))  # type: ignore[call-overload]
    if flag.nargs == 0:
        kinds = (bool,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds != (bool,)):
        raise ConfigError(f"{flag.dest} must be of type {kinds[-1].__name__}, got {value!r}")
    if flag.choices is not None and value not in flag.choices:
        raise ConfigError(f"{flag.dest} must be one of {', '.join(flag.choices)}, got {value!r}")
    return value


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `LLM` that a command line with the model flags asks for."""
    names = vars(_arguments("unused", {}))
    return {name: getattr(args, name) for name in names if name != "model"}


class LLM:
    """A model ready to generate. Calls from several threads run one after the other.

    Args:
        model: as `--model`: "smollm2", a folder, a .gguf file, a hub id, or a built-in shape with
            load_format="dummy".
        skip_tokenizer_init: load no tokenizer: ids in, ids out, no text.
        progress: show bars while loading.
        options: the server's model flags with underscores, e.g. context_length=4096, page_size=16,
            max_running_requests=256, max_total_tokens=65536, dtype="float32", random_seed=0,
            disable_overlap_schedule=True.

    Raises:
        ConfigError, ModelError: it cannot be run as asked. TypeError: an option that does not exist.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        skip_tokenizer_init: bool = False,
        progress: bool = True,
        **options: Any,
    ) -> None:
        if options.get("max_queued_requests") is not None:
            raise ConfigError("max_queued_requests is a server's: here all prompts are handed over at once")
        if skip_tokenizer_init and options.get("chat_template") is not None:
            raise ConfigError("a chat_template needs a tokenizer, and none is loaded: ids in, ids out")
        self.settings = settle_settings(_arguments(os.fspath(model), options))
        for line in self.settings.choices:
            logger.info("%s", line)
        self.tokenizer: Tokenizer | None = None
        self._detokenizer: Detokenizer | None = None
        if not skip_tokenizer_init:
            source, vocab_size = self.settings.source, self.settings.model.vocab_size
            self.tokenizer = load_tokenizer(
                source.tokenizer_path,
                vocab_size=vocab_size,
                chat_template=self.settings.server.chat_template,
            )
            self._detokenizer = Detokenizer(self.tokenizer)
        eos = end_tokens(
            self.settings.model.eos_token_ids, () if self.tokenizer is None else self.tokenizer.eos_token_ids
        )
        tame_libraries()
        self._worker, self.info = build_worker(self.settings, progress=progress)
        self._settler = Settler(
            vocab_size=self.settings.model.vocab_size,
            context_length=self.settings.scheduler.context_length,
            eos_token_ids=eos,
            seed_source=self.settings.engine.random_seed,
            max_request_tokens=self.info["max_request_tokens"],
        )
        self._lock = threading.Lock()
        self._is_broken = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        logprobs: LogprobParams | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; results come in the order of the prompts.

        Ctrl-C ends the call when the step in flight has ended, and the next call finds everything free.

        Args:
            prompts: text, token ids, or a list of either.
            params: one for all prompts, or one per prompt; default SamplingParams().
            logprobs: what log-probabilities every request wants; None for none.
            progress: show a bar.

        Raises:
            RequestError: a prompt or parameter is wrong; nothing has been run then.
            EngineError: an earlier call was broken off in a way that this object cannot recover from.
        """
        if logprobs is not None and not isinstance(logprobs, LogprobParams):
            raise RequestError("logprobs must be LogprobParams", param="logprobs")
        texts, ids = self._tokenize(_as_list(prompts))
        samplings = _per_prompt(params, len(ids))
        if self._detokenizer is None and any(s.stop or s.stop_regex for s in samplings):
            raise RequestError(
                "stop strings need a tokenizer, but skip_tokenizer_init was asked for", param="stop"
            )
        with self._lock, held_interrupts() as check_interrupts:
            gc_was_on = gc.isenabled()
            gc.disable()  # a full collection takes 0.1 s with thousands of live requests, and stalls a step
            try:
                return self._generate(texts, ids, samplings, logprobs, progress, check_interrupts)
            finally:
                if gc_was_on:
                    gc.enable()

    def _generate(
        self,
        texts: list[str | None],
        ids: list[Any],
        samplings: list[SamplingParams],
        logprobs: LogprobParams | None,
        progress: bool,
        check_interrupts: Callable[[], None],
    ) -> list[RequestOutput]:
        if self._is_broken:
            raise EngineError("an earlier call was broken off within a step: make a new LLM")
        requests, owners = [], []
        for i, (prompt_ids, sampling) in enumerate(zip(ids, samplings, strict=True)):
            if type(sampling.n) is not int:
                sampling.check(self.settings.model.vocab_size)  # says so
            streams = range(len(owners), len(owners) + sampling.n)
            requests += self._settler.settle(streams, prompt_ids, sampling, logprobs)
            owners += [i] * sampling.n
        collector = Collector(
            [r.sampling for r in requests], self._detokenizer, has_logprobs=logprobs is not None
        )
        self._is_broken = True
        try:
            self._run(requests, collector, progress, check_interrupts)
        finally:
            self._is_broken = not self._end(collector.unfinished())
        results = [
            RequestOutput(prompt=text, prompt_token_ids=_plain_list(prompt), outputs=[])
            for text, prompt in zip(texts, ids, strict=True)
        ]
        for stream, (owner, completion) in enumerate(zip(owners, collector.completions(), strict=True)):
            completion.index = len(results[owner].outputs)
            results[owner].outputs.append(completion)
            if completion.index == 0:
                results[owner].prompt_logprobs = collector.prompt_logprobs(stream)
        return results

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation or many, through the model's chat template."""
        if self.tokenizer is None:
            raise RequestError("chat needs a tokenizer, but skip_tokenizer_init was asked for")
        if not isinstance(messages, Sequence) or any(not isinstance(m, Sequence | dict) for m in messages):
            raise RequestError(
                "messages must be a list of objects, or a list of such lists", param="messages"
            )
        many = [messages] if messages and isinstance(messages[0], dict) else messages
        return self.generate([self.tokenizer.apply_chat_template(list(m)) for m in many], params, **options)

    def host_times(self) -> dict[str, Any]:
        """Histograms of the host's time in each step so far: `runtime.step_times.StepTimes.snapshot`."""
        return self._worker.host_times()

    def _run(
        self,
        requests: list[EngineRequest],
        collector: Collector,
        progress: bool,
        check_interrupts: Callable[[], None],
    ) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("generate"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, disable=not progress, transient=True) as bar:
            total = len(requests)
            task = bar.add_task("", total=total)
            shown = 0
            slices = iter(_step_slices(requests, self.settings.scheduler.max_prefill_tokens))
            while collector.num_finished < total:
                for request in next(slices, ()):  # the others are queued while the first ones run
                    self._worker.add(request)
                for outputs in self._worker.step():
                    stopped = collector.push(outputs)
                    if stopped:
                        self._worker.abort(stopped)
                        self._worker.pending_outputs()  # their ends: the collector knows them already
                self._worker.sent()
                check_interrupts()
                if collector.num_finished != shown:
                    shown = collector.num_finished
                    bar.update(task, completed=shown)

    def _end(self, unfinished: list[int]) -> bool:
        """End these streams and the steps in flight.

        False if rows, pages or steps were lost half way: nothing can run again. Raises no error: the one that
        is on its way says more.
        """
        worker = self._worker
        try:
            worker.abort(unfinished)
            worker.pending_outputs()
            worker.drain()
            if unfinished:
                worker.scheduler.check()  # reads the whole pool
        except Exception:
            logger.exception("what was broken off cannot be ended")
            return False
        return not worker.busy

    def _tokenize(self, prompts: list[Prompt]) -> tuple[list[str | None], list[Any]]:
        texts = [str(p) if isinstance(p, str) else None for p in prompts]  # not NumPy's kind of str
        wanted = [t for t in texts if t is not None]
        if wanted and self.tokenizer is None:
            raise RequestError("text prompts need a tokenizer, but skip_tokenizer_init was asked for")
        encoded = iter(self.tokenizer.encode_batch(wanted) if wanted and self.tokenizer else [])
        return texts, [next(encoded) if isinstance(p, str) else p for p in prompts]


def _step_slices(requests: list[EngineRequest], num_tokens: int) -> Iterator[list[EngineRequest]]:
    """Cut requests into runs of at least `num_tokens` prompt tokens each: what one step can take, or more.

    With one run added before each step, a step finds as much as if all were queued from the start.
    """
    first, size = 0, 0
    for i, request in enumerate(requests, 1):
        size += len(request.input_ids)
        if size >= num_tokens or i == len(requests):
            yield requests[first:i]
            first, size = i, 0


def _plain_list(ids: Any) -> list[int]:
    return ids.tolist() if isinstance(ids, np.ndarray) else list(map(int, ids))


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    is_other = isinstance(prompts, Mapping | Set | bytes | bytearray) or not isinstance(prompts, Iterable)
    if is_other or getattr(prompts, "ndim", 1) == 0:
        raise RequestError(
            f"prompts must be text, token ids, or a list of either, got {type(prompts).__name__}",
            param="prompts",
        )
    prompts = list(prompts)  # type: ignore[arg-type]
    if not prompts:
        raise RequestError("no prompt was given", param="prompts")
    if all(isinstance(p, str) or hasattr(p, "__len__") for p in prompts):
        return prompts  # type: ignore[return-value]
    return [prompts]  # type: ignore[list-item]


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError("params must be SamplingParams, one or a list of them", param="params")
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling params were given for {count} prompts", param="params")
    return list(params)
