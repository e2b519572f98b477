"""Ratios of this package against bare operations and other schedulers; none is a timed test."""
