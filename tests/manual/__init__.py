"""The manual beside its words: pictures."""
