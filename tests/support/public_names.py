"""Names and numbers of public files and formats, written out: a release that changes one of them fails in tests."""

from __future__ import annotations

from typing import Final

MANIFEST_NAME: Final = "mergepipe.json"
BLOCKS_NAME: Final = "mergepipe.blocks"
PARTIAL_MANIFEST_NAME: Final = "mergepipe-partial.json"
MERGEKIT_CONFIG_NAME: Final = "mergekit_config.yml"

# A packed expert.
HEADER_NAME: Final = "mergepipe-store.json"
INDEX_NAME: Final = "mergepipe-store.index"
BLOCK_ELEMENTS: Final = 262_144

# A staging directory, which a killed command leaves: what becomes the output, what is done so far, whose it is.
CONTENT_NAME: Final = "snapshot"
LOG_NAME: Final = "log"
OWNER_NAME: Final = "owner.json"

REPORT_FORMAT: Final = "mergepipe-report/1"

# Formats of training checkpoints, as `tailor inspect` names them.
ZERO_FORMAT: Final = "deepspeed-zero"
DCP_FORMAT: Final = "torch-dcp"
HF_FORMAT: Final = "hf-optimizer"
VERL_FORMAT: Final = "verl-fsdp"
