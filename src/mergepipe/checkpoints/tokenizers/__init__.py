"""Tokenizers: vocabularies, chat templates, and the embedding rows that belong to tokens."""
