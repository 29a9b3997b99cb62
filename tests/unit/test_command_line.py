"""The `phalanx` command before a subcommand runs, and what `phalanx generate` says about its texts."""

from __future__ import annotations

import pytest

from phalanx.cli import main
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
