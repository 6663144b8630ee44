"""Decoding of images of unknown origin, in processes that can open nothing."""
