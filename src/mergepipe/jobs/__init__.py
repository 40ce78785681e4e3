"""One user job a module, named by its verb."""
