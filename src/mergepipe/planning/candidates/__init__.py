"""What can be read of the experts: blocks, costs, statistics, scores."""
