"""The papers' experiments: `make reproduce` measures them into stored results and writes docs/benchmarks from these."""
