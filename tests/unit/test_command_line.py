"""The `phalanx` command before a subcommand runs, and what `phalanx generate` says about its texts."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest

from phalanx.cli import main
from phalanx.core.errors import ConfigError
from phalanx.runtime import launch
from phalanx.runtime.generate import _say_what_was_cut
from phalanx.runtime.outputs import Completion
from phalanx.text.output import FinishReason


@pytest.mark.parametrize(
    ("argv", "prog", "known"),
    [(["srve"], "phalanx", "serve, generate"), (["bench", "servin"], "phalanx bench", "serving, sweep")],
)
def test_a_mistyped_command_is_refused_in_one_line(argv, prog, known, capsys) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"{prog}: error: no command {argv[-1]!r}; there are {known}")


@pytest.mark.parametrize("before", [[], ["bench"]])
def test_help_goes_to_stdout_and_no_command_to_stderr(before, capsys) -> None:
    assert main([*before, "--help"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: phalanx") and err == ""
    assert main(before) == 2
    assert capsys.readouterr() == ("", out)


def test_ctrl_c_while_a_command_is_imported_is_one_line(monkeypatch, capsys) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("phalanx.cli.importlib.import_module", interrupted)
    for command in (["pull", "smollm2"], ["bench", "host"]):
        assert main(command) == 130
        assert capsys.readouterr() == ("", "phalanx: interrupted\n")


@pytest.mark.parametrize("module", ["phalanx.cli", "phalanx.launch_server"])
def test_nothing_slow_is_imported_before_ctrl_c_is_guarded(module) -> None:
    code = f"import sys, {module}; print([n for n in sys.modules if n.split('.')[0] in ('numpy', 'msgspec')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("command", [["--help"], ["bench", "--help"], ["serve", "--help"]])
def test_a_reader_of_the_help_may_leave(command) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", "phalanx", *command],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
        )
    assert done.stderr == "" and done.returncode in (0, 1)


def completion(num_tokens: int, finish: str) -> Completion:
    return Completion(index=0, text="x", token_ids=[7] * num_tokens, finish_reason=FinishReason(finish))


def test_generate_says_what_ends_at_a_limit(capsys) -> None:
    whole, cut, full = completion(8, "stop"), completion(8, "length"), completion(5, "length")
    _say_what_was_cut([whole], 8)
    assert capsys.readouterr() == ("", "")
    _say_what_was_cut([whole, cut, cut], 8)
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("phalanx: 2 of 3 texts stopped at --max-new-tokens 8")
    _say_what_was_cut([full, whole], 8)
    assert capsys.readouterr().err == "phalanx: 1 of 2 texts filled the context\n"


GENERATE = ["generate", "--model", "tiny-llama", "--load-format", "dummy", "--device", "cpu"]
SHORT = ["--context-length", "64", "--max-total-tokens", "1024", "--max-new-tokens", "1", "--json"]


@pytest.mark.parametrize("source", ["file", "-"])
def test_prompts_are_lines_and_nothing_else_ends_one(source, tmp_path, capsys, monkeypatch) -> None:
    data = "a b\r\n\nc\u2028d\x0ce\nf".encode()
    path = tmp_path / "prompts"
    path.write_bytes(data)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert main([*GENERATE, *SHORT, "--file", str(path) if source == "file" else "-"]) == 0
    found = [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()]
    assert found == ["a b", "c\u2028d\x0ce", "f"]


def test_a_file_of_prompts_that_is_no_text_is_refused_in_one_line(tmp_path, capsys) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(b"abc\n\xff\n")
    assert main([*GENERATE, "--file", str(path)]) == 2
    assert capsys.readouterr().err == f"phalanx: error: cannot read {path}: byte 4 is not UTF-8\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it")
@pytest.mark.parametrize("is_full", [True, False])
def test_output_that_cannot_be_written(is_full) -> None:
    """A full disk is one line; a reader that has left is none."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "phalanx", *GENERATE, *SHORT, "a"]
    with open("/dev/full" if is_full else write_end, "wb") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=300)
    if is_full:
        os.close(write_end)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert ("phalanx: error: cannot write: No space left on device\n" in done.stderr) == is_full


@pytest.mark.parametrize("host", ["a..b", "x" * 64, "\udcff"])
def test_a_host_that_is_no_name_is_refused(host) -> None:
    with pytest.raises(ConfigError) as error:
        launch.bind(host, 0)
    assert str(error.value) == f"--host {host!a} is no address and no host name"


def test_a_port_in_use_names_its_flag() -> None:
    with launch.bind("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match="--port takes another"):
        launch.bind("127.0.0.1", taken.getsockname()[1])
