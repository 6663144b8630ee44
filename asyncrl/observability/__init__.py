"""What a run did, and when: intervals of episodes, and records for extensions."""
