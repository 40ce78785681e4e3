"""Record a run: rows of the catalog, digests of content, the manifest."""
