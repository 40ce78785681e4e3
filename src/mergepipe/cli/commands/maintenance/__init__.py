"""Commands that clean up and look after the catalog."""
