"""Grouped GEMMs for few rows an expert, which run at the speed of reading the weights."""
