"""Entropy coding of small symbols: rANS in numba and as vector code."""
