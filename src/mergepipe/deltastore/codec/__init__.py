"""Encode and decode one block of an expert relative to its base; `block` is the entry point.

The format is specified in docs/internals/formats/delta-store.md. Words used throughout:

- *Step*: the difference of an element's rank, among all values of its dtype, from that of the base's element.
- *Number*: a step folded to be positive, as it is coded. *Symbol*: its leading bits, which are entropy coded.
- *Context*: a range of base exponents whose elements share symbol frequencies.
- *Cut*: the |delta| from which on elements of a tensor are in HEAD.
- *Piece*: the bytes of one kind that a block stores (HEAD, REST, WHOLE). *Level*: which pieces are read.
- *Tile*: the elements that compiled loops handle at a time, so that intermediate arrays stay in the cache.
"""
