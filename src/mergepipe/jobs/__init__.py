"""Run the user's jobs, one per module, named by its verb."""
