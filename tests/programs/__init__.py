"""Programs that others have written, with percore in the place of their pool: `make test-programs`."""
