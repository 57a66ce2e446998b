"""Everything of `brorl tune`: pilot, candidates, race, clock, final and answer."""
