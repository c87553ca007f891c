"""observe: figures about a manager: statistics, the reasons for missed prompts, and reuse distances. No rule is here."""
