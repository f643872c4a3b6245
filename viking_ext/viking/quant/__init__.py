"""Weights in 8 bit: how they are made, kept, saved, and read on the device."""
