"""Read and align tokenizers: vocabularies, chat templates, embedding rows of tokens."""
