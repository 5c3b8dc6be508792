"""Everything that can go wrong at once, for minutes: ``make soak``."""
