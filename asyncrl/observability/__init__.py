"""What a run did, and when: timelines of episodes and processes, and the traces that are made of them."""
