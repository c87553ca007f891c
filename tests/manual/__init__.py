"""The manual's pages that are more than their words: a whole engine."""
