"""Residual bits: their widths, their streams, and how they are packed."""
