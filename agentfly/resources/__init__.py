"""Layer IV: what tools and rewards run in, leased from bounded pools."""
