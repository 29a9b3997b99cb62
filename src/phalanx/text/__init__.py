"""Strings and ids: tokenizer, chat template, incremental detokenizer. Knows no sockets."""
