"""Experiments of single papers, each in a folder of its own. They use asyncrl, which imports none of them."""
