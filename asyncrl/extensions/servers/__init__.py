"""Choice among servers of which any may answer."""
