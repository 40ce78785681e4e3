"""The merge rules, one family a module."""
