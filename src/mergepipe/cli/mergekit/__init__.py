"""The command `mergepipe-yaml`, which takes the flags of mergekit-yaml."""
