"""Which results are repeats of one workload, and in what two workloads differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from phalanx.bench.errors import BenchError
from phalanx.bench.settle import DATASET_OPTIONS

Line = dict[str, Any]

# Options that change what is sent, when, or under what conditions. The seed is none of them: runs that differ
# in it alone are repeats.
WORKLOAD_OPTIONS = (
    *("dataset_name", "dataset_path", "num_prompts"),
    *("random_input_len", "random_output_len", "random_range_ratio", "vllm_random_range"),
    *("sharegpt_output_len", "sharegpt_context_len", "apply_chat_template", "tokenize_prompt"),
    *("gsp_num_groups", "gsp_prompts_per_group", "gsp_system_prompt_len", "gsp_question_len"),
    *("gsp_output_len", "gsp_range_ratio", "gsp_ordered"),
    *("request_rate", "burstiness", "ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps"),
    "max_concurrency",
    *("disable_stream", "disable_ignore_eos", "temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("return_logprob", "top_logprobs_num", "logprob_start_len", "extra_request_body"),
    *("warmup_requests", "flush_cache", "profile"),
)
# What is measured. It may differ between the two sides, never within one.
SUBJECT_OPTIONS = ("backend", "model", "tokenizer")
# Where the server is, how the client looks at it, and what it writes.
OTHER_OPTIONS = (
    *("base_url", "host", "port", "ready_check_timeout_sec", "served_model_name", "header", "seed"),
    *("client_processes", "server_metrics", "profile_activities", "profile_num_steps", "profile_by_stage"),
    *("profile_output_dir", "profile_prefix", "output_file", "output_details", "goodput", "disable_tqdm"),
    *("cache_report", "plot", "tag"),
)
# What a bare command line means; a description leaves it out.
_PLAIN: dict[str, Any] = {"burstiness": 1.0, "top_p": 1.0, "logprob_start_len": -1, "warmup_requests": 1}


@dataclass(frozen=True, slots=True)
class Workload:
    """What a run asked for.

    Attributes:
        fields: "sent" (the number of requests) and the value of each of `WORKLOAD_OPTIONS`.
    """

    fields: dict[str, Any]

    @property
    def key(self) -> bytes:
        """Equal for equal workloads."""
        return orjson.dumps(self.fields, option=orjson.OPT_SORT_KEYS)

    def describe(self) -> str:
        """Return one line with what is not plain, or has no meaning for the dataset."""
        dataset = self.fields["dataset_name"]
        shown = []
        for name, value in self.fields.items():
            used_by = DATASET_OPTIONS[name][0] if name in DATASET_OPTIONS else (dataset,)
            plain = value in (None, False, "", {}) or value == _PLAIN.get(name)
            if dataset in used_by and name != "num_prompts" and not plain:
                shown.append(f"{name} {_text(value)}")
        return "Workload: " + ", ".join(shown)


def workload_of(line: Line) -> Workload:
    """Return the workload of a JSON line of `bench serving`, by its configuration."""
    config = line["config"]
    # The settled number of prompts is that of the options; a short file may give fewer.
    return Workload({"sent": line["sent"], **{name: config.get(name) for name in WORKLOAD_OPTIONS}})


def group_by_workload(lines: Sequence[Line]) -> list[tuple[Workload, list[Line]]]:
    """Return the lines of each workload, in order of first appearance.

    Raises:
        BenchError: exit code 2; lines of one workload measured different things (backend, model, server).
    """
    groups: dict[bytes, tuple[Workload, list[Line]]] = {}
    for line in lines:
        workload = workload_of(line)
        groups.setdefault(workload.key, (workload, []))[1].append(line)
    for _, group in groups.values():
        if len({line["compare"]["side"] for line in group if "compare" in line}) > 1:
            raise BenchError("one side has both servers' runs of a comparison: split the file", exit_code=2)
        for name in SUBJECT_OPTIONS:
            values = {_text(line["config"].get(name)) for line in group}
            if len(values) > 1:
                raise BenchError(
                    f"one side has runs of one workload with different {name}: {', '.join(sorted(values))}",
                    exit_code=2,
                )
    return list(groups.values())


def nearest_difference(workload: Workload, others: Sequence[Workload]) -> str:
    """Return in what the most similar of `others` (one at least) differs, e.g. "request_rate 4.0 / 8.0"."""
    differing = [
        [name for name, value in workload.fields.items() if value != other.fields[name]] for other in others
    ]
    least = min(range(len(others)), key=lambda i: len(differing[i]))
    fields = others[least].fields
    return ", ".join(
        f"{name} {_text(workload.fields[name])} / {_text(fields[name])}" for name in differing[least]
    )


def _text(value: Any) -> str:
    if value is None:
        return "not given"
    return orjson.dumps(value).decode() if isinstance(value, (dict, list, bool)) else str(value)
