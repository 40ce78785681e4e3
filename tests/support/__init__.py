"""Test machinery: oracles, families of models, stores, faults, crashes, power loss, fuzzers."""
