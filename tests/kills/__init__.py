"""Every part of a run and of a job, struck in every phase, on a real node: ``make kills``."""
