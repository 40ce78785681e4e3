"""Packing experts while they are merged or analysed, and reading packed ones under a budget."""
