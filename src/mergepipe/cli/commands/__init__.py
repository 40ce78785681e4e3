"""The commands, one a module: parse, call one function of the API, print."""
