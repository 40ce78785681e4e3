"""Overlay snapshots, which store only the blocks that differ from the base."""
