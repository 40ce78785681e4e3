"""Inputs in object stores and on web servers: pinned byte ranges, every attempt charged before it is made."""
