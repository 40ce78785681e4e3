"""Reports as text tables, pages and JSON."""
