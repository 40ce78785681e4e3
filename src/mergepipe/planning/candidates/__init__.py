"""List the candidates for reading: blocks of experts, their costs, statistics and scores."""
