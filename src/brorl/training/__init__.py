"""The training loop: the group collectors, the learner, the schedule, and the records."""
