"""Studies: generators that yield run specs, are sent run records, and return an answer."""
