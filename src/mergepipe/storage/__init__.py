"""Storage: locations, exact and metered range reads, durable writes, and the bounds of memory."""
