"""What an interrupted run leaves, and how the next one resumes it within its budget."""
