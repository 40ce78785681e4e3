"""How kernels are compiled, and when the compiler may be loaded."""
