"""Describe a snapshot to those who find it published: model card, Hub ids, files that are left out."""
