"""What a setting will give: the system in simulated time, with the real buffer and concurrency rule, and the laws."""
