"""The largest size of each kind of small file that is read into memory as a whole.

Each limit is several times the size of the largest real file of its kind. A larger one is refused by
`storage.too-large` before anything of it is read.
"""

from __future__ import annotations

from typing import Final

_KIB, _MIB = 1 << 10, 1 << 20

# -- files of models --
CONFIG_BYTES: Final = 16 * _MIB  # two names for each of 22,000 classes take 3 MB
CARD_BYTES: Final = 8 * _MIB  # README.md of a model: prose and tables of results
TEMPLATE_BYTES: Final = 4 * _MIB  # chat templates that write tools and images have 30 kB
TOKENIZER_BYTES: Final = 128 * _MIB  # tokenizer.json of 262,000 tokens with their merges has 35 MB
SIDECARS_BYTES: Final = 256 * _MIB  # of one model together: a tokenizer in three forms has 50 MB
WEIGHT_INDEX_BYTES: Final = 24 * _MIB  # one line a tensor: 140,000 of 384 experts in 60 layers, with scales, take 14 MB
ADAPTER_CONFIG_BYTES: Final = 4 * _MIB  # names modules, each at most once

# -- files of training checkpoints --
TRAINER_JSON_BYTES: Final = 256 * _MIB  # trainer_state.json logs every step
LATEST_BYTES: Final = 200  # the name of one directory
PICKLE_BYTES: Final = 256 * _MIB  # .metadata of DCP, data.pkl of torch: one record a tensor and rank
ZIP_DIRECTORY_BYTES: Final = 128 * _MIB  # a member a tensor: a million of 100 bytes
SAVE_LOG_BYTES: Final = 256 * _MIB  # one line a save
PARTIAL_MANIFEST_BYTES: Final = 256 * _MIB  # one record a tensor and shard

# -- files of ours --
RECIPE_BYTES: Final = 1 * _MIB  # written by hand
IMPORTANCE_BYTES: Final = 64 * _MIB  # one number a tensor
PLAN_BYTES: Final = 256 * _MIB  # one record a tensor, with the blocks that are read
MANIFEST_BYTES: Final = 256 * _MIB  # one record a tensor
BLOCK_TABLE_BYTES: Final = 1024 * _MIB  # 16 bytes a block of 256 KiB or so: 10**13 elements
STORE_HEADER_BYTES: Final = 64 * _MIB  # one record a tensor
WORK_LOG_BYTES: Final = 256 * _MIB  # one digest a block
STATISTICS_BYTES: Final = 256 * _MIB  # 0.025 % of the experts: those of 10**12 bytes
OWNER_BYTES: Final = 64 * _KIB  # four short values

_TEMPLATE_NAMES = ("chat_template.json",)
_CONFIG_NAMES = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip


def sidecar_limit(name: str) -> int:
    """The size limit of a file that a checkpoint holds beside its weights, by its name."""
    if name.endswith(".jinja") or name in _TEMPLATE_NAMES:
        return TEMPLATE_BYTES
    return CONFIG_BYTES if name in _CONFIG_NAMES else TOKENIZER_BYTES
