"""Packing: experts encoded into delta stores in one streaming pass."""
