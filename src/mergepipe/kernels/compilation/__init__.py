"""Compile kernels, and load the compiler only when it is needed."""
