"""What a run did, kept so that it can be looked at, replayed and continued: docs/records.md."""
