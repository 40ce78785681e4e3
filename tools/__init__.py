"""What the repository needs and users do not: pages written from the code."""
