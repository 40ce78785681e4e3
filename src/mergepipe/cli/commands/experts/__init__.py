"""Commands that pack and unpack experts."""
