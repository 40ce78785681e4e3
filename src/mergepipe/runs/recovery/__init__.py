"""Resume interrupted runs within their budget."""
