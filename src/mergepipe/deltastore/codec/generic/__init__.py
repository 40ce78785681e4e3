"""Coding of elements of any dtype as byte planes, and byte arrays handled safely."""
