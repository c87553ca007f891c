"""The files of a tier, and the secrets of its URL: nobody else gets to see them."""
