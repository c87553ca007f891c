"""tables: the page tables of the spaces, and the steps that change them: plan, commit, abort, resize, forget."""
