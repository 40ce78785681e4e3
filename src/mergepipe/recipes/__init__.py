"""Read recipes: from YAML to one merge task per output tensor."""
