"""The oracle of refactorings: what a run computes, sends and starts, which no move of code may change (make golden)."""
