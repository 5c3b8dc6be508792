"""Decisions of the operator. Pure: what is wanted and what was seen go in, data comes out."""
