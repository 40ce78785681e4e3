"""Reports as text tables, and as pages."""
