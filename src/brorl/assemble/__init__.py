"""Config to objects: the only place that turns settings into engines, learners, streams and runs."""
