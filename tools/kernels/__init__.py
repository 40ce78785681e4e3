"""Builds the libraries of compiled kernels."""
