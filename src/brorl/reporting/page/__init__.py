"""The report: one HTML file that shows runs and needs no network."""
