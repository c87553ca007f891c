"""The files of a tier, and the secrets of its URL, are for its user alone."""
