"""Trainers that call into Viking: one package for each, with the functions that its patches call."""
