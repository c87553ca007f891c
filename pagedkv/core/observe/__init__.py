"""observe: figures about a manager: statistics, why a prompt is missed, reuse distances. No rule is here."""
