"""The delta store: an expert packed losslessly as its differences from its base, readable at several levels.

Format: docs/internals/formats/delta-store.md.
"""
