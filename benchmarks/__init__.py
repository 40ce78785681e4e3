"""Speed and memory claims, each with its baseline and the I/O floor in the same run.

`python -m benchmarks.reproduce` measures and writes docs/benchmarks. `reproduce.registry` names its parts, each a
module beside it that says what is measured and what its page tells. They share `reproduce.workplace` (families, cold
merges), `reproduce.results` (what is stored), `reproduce.pages` and `reproduce.writing`; below these are `process`
(what a program costs), `floor`, `deltas` (errors), `recipes`, `peers` (other programs), `tailor` (checkpoints) and
`tiny_lm`.

In environments of their own run `packed_codecs`, `partial_saving` and `tailor_resuming`, by the commands on
docs/internals/benchmarks.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))  # the generators of model families
