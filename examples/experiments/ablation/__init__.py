"""The paper's ablation (appendix C.3) on Python files: its corpus, its runs, what is measured, and the report."""
