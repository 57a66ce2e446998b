"""The training loop: the collector of groups, the learner, the schedule, and the records."""
