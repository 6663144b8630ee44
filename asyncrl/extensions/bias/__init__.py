"""Whether what is trained is a fair sample of what was generated."""
