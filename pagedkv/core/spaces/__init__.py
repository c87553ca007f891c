"""spaces: prompts that open together, prompts that wait for one another, and how the beams of a search go on."""
