"""Results of earlier snapshots that a merge takes instead of computing them again."""
