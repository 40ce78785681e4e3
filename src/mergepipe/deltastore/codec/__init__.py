"""Encode and decode one block of an expert relative to its base; `block` is the entry point.

The format is specified in docs/internals/formats/delta-store.md. Words used throughout:

- *Ordinal*: the rank of a bf16 value among all bf16 values; a difference of ordinals counts representable values.
- *Band*: a range of |delta|; band 1 has the largest. *Cut*: the lower bound of a band. *Edge*: base plus or minus the
  cut, from which residuals in a band are counted.
- *Cell*: a range of ordinal differences, for elements outside the bands.
- *Code*: band and direction of an element, or its cell. *Symbol*: a code as one of the two entropy-coded stages has it.
- *Residual*: which value inside the band or cell. *Exception*: an element that code and residual cannot express.
- *Context*: a range of base exponents whose elements share symbol frequencies.
- *Piece*: the bytes of one kind that a block stores (HEAD, HEAD_FINE, ...). *Level*: which pieces are read.
- *Tile*: the elements that compiled loops handle at a time, so that intermediate arrays stay in the cache.
"""
