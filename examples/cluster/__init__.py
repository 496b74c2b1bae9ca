"""What a run on many nodes needs before it starts: recipes, its plan, its memory, a preflight, launchers."""
