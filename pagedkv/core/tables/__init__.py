"""tables: which space maps which frames, and the steps that change it: plan, commit, abort, resize, forget."""
