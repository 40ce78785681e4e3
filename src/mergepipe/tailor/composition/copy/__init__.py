"""Output files as byte ranges of the sources, and the threads that copy them."""
