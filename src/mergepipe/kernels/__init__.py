"""Compiled inner loops: stored bytes to float32 tiles, deltas, merges, sums and histograms; no files, no policy.

Arrays are named with their dimensions: E experts, F base and experts ("frame"), N elements, R rows, A atoms, B bins.
`offsets_E` and `codes_E` list the stored tensors of the experts that are present, `present_E` their expert numbers.
"""
