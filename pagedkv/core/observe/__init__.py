"""observe: figures about a manager: statistics, why a prompt is missed. No rule is here."""
