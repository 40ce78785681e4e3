"""One job of a user a module: opens inputs, runs the engine, records and publishes."""
