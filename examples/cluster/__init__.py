"""Running on a cluster: launchers, recipes, the plan of a run, its memory estimate, and a preflight of the nodes."""
