"""Finding a model and settling a run: the part of start-up that needs no torch."""

from __future__ import annotations

import argparse

from phalanx.config.groups import Settings
from phalanx.config.hardware import detect
from phalanx.config.resolve import resolve
from phalanx.core.settle import end_tokens
from phalanx.models.configs import load_model_config
from phalanx.models.source import resolve_source
from phalanx.text.tokenizer import load_tokenizer


def settle_settings(args: argparse.Namespace) -> Settings:
    """Settings of a run from its command line.

    Raises:
        ConfigError, ModelError: with one line for the user.
    """
    source = resolve_source(
        args.model,
        load_format=args.load_format,
        tokenizer_path=args.tokenizer_path,
        revision=args.revision,
    )
    return resolve(args, detect(), source, load_model_config(source))


def check_tokenizer(settings: Settings) -> None:
    """Load the tokenizer once before any process is started, so that a missing one is refused at once.

    Raises:
        ConfigError, ModelError: there is none, its template is unusable, or it has an end token too many.
    """
    if not settings.server.skip_tokenizer_init:
        tokenizer = load_tokenizer(
            settings.source.tokenizer_path,
            vocab_size=settings.model.vocab_size,
            chat_template=settings.server.chat_template,
        )
        end_tokens(settings.model.eos_token_ids, tokenizer.eos_token_ids)
