"""One module per experiment; each prints what it found."""
