"""The loop of a run: the collector of groups, the learner, the schedule, and what is recorded."""
