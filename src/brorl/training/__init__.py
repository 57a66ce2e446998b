"""The loop of a run: the source of groups, the learner, the schedule, and what is recorded."""
