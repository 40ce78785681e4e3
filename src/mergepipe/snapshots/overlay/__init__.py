"""Overlay snapshots: only the blocks that differ from the base are stored."""
