"""Finding a model and settling a run: the part of start-up that needs no torch."""

from __future__ import annotations

import argparse

from phalanx.config.groups import Settings
from phalanx.config.hardware import detect
from phalanx.config.resolve import resolve
from phalanx.models.configs import load_model_config
from phalanx.models.source import resolve_source


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
