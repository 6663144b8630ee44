"""Engines whose weights have 8 bits, or the error of 8 bits, which the trainers quantize at each publish."""
