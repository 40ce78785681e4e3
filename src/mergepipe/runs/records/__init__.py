"""What a run records: rows of the catalog, digests of content, the manifest."""
